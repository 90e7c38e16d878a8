"""The pool's metrics in vLLM's connector metrics (Prometheus and the periodic log line)."""

from __future__ import annotations

import time

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
)

from forebay.storage.plan import TransferResult
from forebay.storage.pool import Pool
from forebay.vllm_ext.metadata import ForebayWorkerMetadata

GAUGE_PERIOD = 1.0
"""Seconds between two readings of the gauges (our choice: well below any scrape interval)."""

READ_BYTES = "forebay:kv_device_read_bytes"
READ_TIME = "forebay:kv_device_read_seconds"
WRITE_BYTES = "forebay:kv_device_write_bytes"
WRITE_TIME = "forebay:kv_device_write_seconds"
QUEUE_DEPTH = "forebay:kv_device_queue_depth"
USED_BYTES = "forebay:kv_device_used_bytes"
CAPACITY_BYTES = "forebay:kv_device_capacity_bytes"
QUARANTINED = "forebay:kv_device_quarantined"
BANDWIDTH = "forebay:kv_device_read_bandwidth"
SKEW = "forebay:kv_stripe_skew_seconds"
LOAD_SECONDS = "forebay:kv_load_seconds"
LOAD_FAILURES = "forebay:kv_load_failures"
STORE_FAILURES = "forebay:kv_store_failures"
STORES_DROPPED = "forebay:kv_stores_dropped"
EVICTIONS = "forebay:kv_evictions"

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_DEVICE = ("device",)


def definitions() -> dict[str, OffloadingMetricMetadata]:
    """Every metric that the plugin emits, by name."""
    return {
        READ_BYTES: OffloadingCounterMetadata("Hit bytes that came from the device.", _DEVICE),
        READ_TIME: OffloadingCounterMetadata("Seconds from the start of a load to the device's last stripe.", _DEVICE),
        WRITE_BYTES: OffloadingCounterMetadata("Bytes stored on the device, copies included.", _DEVICE),
        WRITE_TIME: OffloadingCounterMetadata(
            "Seconds from the start of a store to the device's last stripe.", _DEVICE
        ),
        QUEUE_DEPTH: OffloadingGaugeMetadata("Operations waiting or in flight on the device.", _DEVICE),
        USED_BYTES: OffloadingGaugeMetadata("Bytes of the device that hold chunks.", _DEVICE),
        CAPACITY_BYTES: OffloadingGaugeMetadata("Bytes that the pool may use of the device.", _DEVICE),
        QUARANTINED: OffloadingGaugeMetadata("1 while the device is quarantined.", _DEVICE),
        BANDWIDTH: OffloadingGaugeMetadata("Read bandwidth that placement assumes (bytes per second).", _DEVICE),
        SKEW: OffloadingHistogramMetadata(
            "Seconds between the first and the last device to finish a load.", buckets=_SECONDS
        ),
        LOAD_SECONDS: OffloadingHistogramMetadata("Seconds of a load on one rank.", buckets=_SECONDS),
        LOAD_FAILURES: OffloadingCounterMetadata("Chunks that failed to load and were recomputed."),
        STORE_FAILURES: OffloadingCounterMetadata("Chunks that failed to be stored."),
        STORES_DROPPED: OffloadingCounterMetadata(
            "Chunks not stored because too much was being written or no space could be freed."
        ),
        EVICTIONS: OffloadingCounterMetadata("Chunks evicted."),
    }


class PoolMetrics:
    """Collects the pool's numbers on the scheduler's side."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._stats = OffloadingConnectorStats()
        self._next_gauges = 0.0
        self._seen = {STORES_DROPPED: 0, EVICTIONS: 0}

    def record(self, metadata: ForebayWorkerMetadata) -> None:
        """Count what the workers report."""
        for result in metadata.loads:
            self._count(result, READ_BYTES, READ_TIME, LOAD_FAILURES)
            self._stats.observe_histogram(LOAD_SECONDS, result.seconds)
            if len(result.device_seconds) > 1:
                ends = result.device_seconds.values()
                self._stats.observe_histogram(SKEW, max(ends) - min(ends))
        for result in metadata.stores:
            self._count(result, WRITE_BYTES, WRITE_TIME, STORE_FAILURES)
        for name, depth in metadata.queue_depth.items():
            self._stats.set_gauge(QUEUE_DEPTH, depth, (name,))

    def take(self) -> OffloadingConnectorStats | None:
        """Everything since the last call, None when there is nothing."""
        now = time.monotonic()
        if now >= self._next_gauges:
            self._next_gauges = now + GAUGE_PERIOD
            self._read_pool()
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, OffloadingConnectorStats()
        return stats

    def _count(self, result: TransferResult, bytes_name: str, time_name: str, failures_name: str) -> None:
        for name, count in result.device_bytes.items():
            self._stats.increase_counter(bytes_name, count, (name,))
        for name, seconds in result.device_seconds.items():
            self._stats.increase_counter(time_name, seconds, (name,))
        if result.failed:
            self._stats.increase_counter(failures_name, len(result.failed))

    def _read_pool(self) -> None:
        stats = self._pool.stats()
        for device in stats.devices:
            self._stats.set_gauge(USED_BYTES, device.used_bytes, (device.name,))
            self._stats.set_gauge(CAPACITY_BYTES, device.capacity_bytes, (device.name,))
            self._stats.set_gauge(QUARANTINED, int(device.quarantined), (device.name,))
            self._stats.set_gauge(BANDWIDTH, device.read_bandwidth, (device.name,))
        for name, total in ((STORES_DROPPED, stats.dropped_stores), (EVICTIONS, stats.evictions)):
            if total > self._seen[name]:
                self._stats.increase_counter(name, total - self._seen[name])
                self._seen[name] = total
