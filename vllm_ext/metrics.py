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
from forebay.vllm_ext.worth import LoadJudge, Verdict

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
HITS_JUDGED = "forebay:kv_hits_judged"
HIT_TOKENS_LOADED = "forebay:kv_hit_tokens_loaded"
HIT_TOKENS_COMPUTED = "forebay:kv_hit_tokens_computed"
LOAD_ESTIMATE = "forebay:kv_load_estimate_seconds"
COMPUTE_ESTIMATE = "forebay:kv_compute_estimate_seconds"
LOADS_GIVEN_UP = "forebay:kv_loads_given_up"
CURRENT_BANDWIDTH = "forebay:kv_device_current_bandwidth"
PREFILL_RATE = "forebay:kv_prefill_tokens_per_second"

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_ESTIMATES = (*_SECONDS, 30.0, 100.0, 300.0)
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
        HITS_JUDGED: OffloadingCounterMetadata(
            "Hits by what was decided: loaded, trimmed (the end is computed) or computed.", ("decision",)
        ),
        HIT_TOKENS_LOADED: OffloadingCounterMetadata("Tokens of hits that were loaded."),
        HIT_TOKENS_COMPUTED: OffloadingCounterMetadata("Tokens of hits that were faster to compute."),
        LOAD_ESTIMATE: OffloadingHistogramMetadata("Estimated seconds to load a hit.", buckets=_ESTIMATES),
        COMPUTE_ESTIMATE: OffloadingHistogramMetadata("Estimated seconds to compute a hit.", buckets=_ESTIMATES),
        LOADS_GIVEN_UP: OffloadingCounterMetadata("Loads that took longer than computing would have."),
        CURRENT_BANDWIDTH: OffloadingGaugeMetadata(
            "Read bandwidth that loads are judged by (bytes per second on one rank).", _DEVICE
        ),
        PREFILL_RATE: OffloadingGaugeMetadata("Prompt tokens that the engine computes per second, without attention."),
    }


class PoolMetrics:
    """Collects the pool's numbers on the scheduler's side."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._stats = OffloadingConnectorStats()
        self._next_gauges = 0.0
        self._seen = {STORES_DROPPED: 0, EVICTIONS: 0}
        self.judge: LoadJudge | None = None

    def record(self, metadata: ForebayWorkerMetadata) -> None:
        """Count what the workers report."""
        for result in metadata.loads:
            self._count(result, READ_BYTES, READ_TIME, LOAD_FAILURES)
            self._stats.observe_histogram(LOAD_SECONDS, result.seconds)
            if result.late:
                self._stats.increase_counter(LOADS_GIVEN_UP, 1)
            if len(result.device_seconds) > 1:
                ends = result.device_seconds.values()
                self._stats.observe_histogram(SKEW, max(ends) - min(ends))
        for result in metadata.stores:
            self._count(result, WRITE_BYTES, WRITE_TIME, STORE_FAILURES)
        for name, depth in metadata.queue_depth.items():
            self._stats.set_gauge(QUEUE_DEPTH, depth, (name,))

    def record_verdict(self, verdict: Verdict) -> None:
        """Count what was decided about a hit."""
        decision = "computed" if not verdict.kept else "loaded" if verdict.kept == verdict.hit else "trimmed"
        self._stats.increase_counter(HITS_JUDGED, 1, (decision,))
        if verdict.kept:
            self._stats.increase_counter(HIT_TOKENS_LOADED, verdict.kept)
        if verdict.kept < verdict.hit:
            self._stats.increase_counter(HIT_TOKENS_COMPUTED, verdict.hit - verdict.kept)
        self._stats.observe_histogram(LOAD_ESTIMATE, verdict.load_seconds)
        if verdict.compute_seconds is not None:
            self._stats.observe_histogram(COMPUTE_ESTIMATE, verdict.compute_seconds)

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
        if self.judge is not None:
            self._read_judge(self.judge)
        for name, total in ((STORES_DROPPED, stats.dropped_stores), (EVICTIONS, stats.evictions)):
            if total > self._seen[name]:
                self._stats.increase_counter(name, total - self._seen[name])
                self._seen[name] = total

    def _read_judge(self, judge: LoadJudge) -> None:
        names = [device.name for device in self._pool.config.devices]
        for name, bandwidth in zip(names, judge.bandwidths(), strict=True):
            self._stats.set_gauge(CURRENT_BANDWIDTH, bandwidth, (name,))
        if judge.cost.token_seconds:
            self._stats.set_gauge(PREFILL_RATE, 1 / judge.cost.token_seconds)
