"""The runtime's numbers at /metrics.

vLLM carries numbers of a KV connector from the engine to its API servers and shows them there. The architecture hook
names `DiffusionMetrics` as the connector of a diffusion model for that alone: it is never made, and moves no data.
"""

from __future__ import annotations

import time
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats

from forebay.vllm_ext.diffusion.messages import Counts

PREFIX = "forebay:dlm_"
PERIOD = 1.0
"""Seconds between two readings of the gauges (our choice: well below any scrape interval)."""

COUNTERS = {
    "prefix_hits": "Requests whose prefix had its states ready.",
    "prefix_misses": "Requests whose prefix had its states computed.",
    "prefix_restored": "Prefix hits that the pool answered.",
    "prefix_evictions": "Prefixes that memory had no room for.",
    "passes": "Forward passes over all requests that take part.",
    "steps": "Denoising steps, summed over requests.",
    "refreshes": "Steps that computed a prefix anew in the layers that do not reuse it.",
    "tokens": "Tokens of finished blocks.",
    "audits": "Steps that compared a prefix's reused layers with true ones.",
    "guard_interventions": "Audits that lowered how many layers a prefix is reused in.",
}
GAUGES = {
    "tokens_per_step": "Tokens of a denoising step, over the requests that finished lately.",
    "prefixes": "Prefixes that have states in memory.",
    "state_bytes": "Bytes of prefix states in memory.",
    "pool_bytes": "Bytes of prefix states in the pool.",
}
DEPTHS = "reused_layers"
BUCKETS = (0, 1, 2, 3, 5, 8, 13, 20, 32, 64)


class RuntimeMetrics:
    """Turns the runtime's totals into what happened since the last time, on the scheduler's side."""

    def __init__(self) -> None:
        self._stats = OffloadingConnectorStats()
        self._seen = Counts()
        self._steps = self._tokens = 0
        self._next_gauges = 0.0

    def note(self, now: Counts) -> None:
        """Take the totals of a step."""
        for name in COUNTERS:
            more = getattr(now, name) - getattr(self._seen, name)
            if more:
                self._stats.increase_counter(PREFIX + name, more)
        for depth, count in now.depths.items():
            for _ in range(count - self._seen.depths.get(depth, 0)):
                self._stats.observe_histogram(PREFIX + DEPTHS, depth)
        self._seen = now

    def take(self) -> dict[str, Any] | None:
        """Everything since the last call, None when there is nothing."""
        if time.monotonic() >= self._next_gauges:
            self._next_gauges = time.monotonic() + PERIOD
            self._read_gauges()
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, OffloadingConnectorStats()
        return stats.to_dict()

    def _read_gauges(self) -> None:
        now = self._seen
        for name in ("prefixes", "state_bytes", "pool_bytes"):
            self._stats.set_gauge(PREFIX + name, getattr(now, name))
        if now.steps > self._steps:
            rate = (now.tokens - self._tokens) / (now.steps - self._steps)
            self._stats.set_gauge(PREFIX + "tokens_per_step", rate)
            self._steps, self._tokens = now.steps, now.tokens


class Shown(KVConnectorPromMetrics):
    """The metrics in an API server."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        made = {PREFIX + name: self._counter_cls(PREFIX + name, text, labelnames) for name, text in COUNTERS.items()}
        for name, text in GAUGES.items():
            made[PREFIX + name] = self._gauge_cls(PREFIX + name, text, labelnames, multiprocess_mode="mostrecent")
        text = "Layers that reused the prefix, by request."
        made[PREFIX + DEPTHS] = self._histogram_cls(PREFIX + DEPTHS, text, labelnames, buckets=BUCKETS)
        self._shown = {
            (engine, name): metric.labels(*values)
            for engine, values in per_engine_labelvalues.items()
            for name, metric in made.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take what the scheduler sent."""
        for name, by_label in transfer_stats_data["data"].items():
            metric = self._shown[engine_idx, name]
            for value in by_label.values():
                if isinstance(metric, Counter):
                    metric.inc(value)
                elif isinstance(metric, Gauge):
                    metric.set(value)
                elif isinstance(metric, Histogram):
                    for one in value:
                        metric.observe(one)


class DiffusionMetrics(KVConnectorBase_V1):
    """What vLLM asks for the classes above."""

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> OffloadingConnectorStats:
        """For vLLM's periodic line in the log."""
        return OffloadingConnectorStats(data) if data else OffloadingConnectorStats()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> Shown:
        """For /metrics."""
        return Shown(vllm_config, metric_types, labelnames, per_engine_labelvalues)
