"""What travels between the scheduler's and the workers' side of the connector."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.v1.kv_offload.base import LoadStoreSpec

from forebay.storage.plan import DeviceHealth, LoadPlan, StorePlan, TransferResult


@dataclass
class ForebayLoadSpec(LoadStoreSpec):
    """Where the chunks of a load lie, in the order vLLM asked for them."""

    keys: list[bytes]
    groups: list[int]
    """KV-cache group of each key (vLLM's group id)."""
    plans: dict[bytes, LoadPlan]
    """By key; a key that has left the pool meanwhile has none and fails."""


@dataclass
class ForebayStoreSpec(LoadStoreSpec):
    """Where the chunks of a store go, in the order vLLM will name their blocks."""

    plans: list[StorePlan]
    groups: list[int]


@dataclass
class JobReport:
    """How one job ended on one or more ranks."""

    failed: dict[bytes, str] = field(default_factory=dict)
    checksums: dict[bytes, dict[int, tuple[int, ...]]] = field(default_factory=dict)
    """Stores: CRC-32C by key, lane and stripe."""

    def merge(self, other: JobReport) -> None:
        """Add what another rank says."""
        self.failed.update(other.failed)
        for key, lanes in other.checksums.items():
            self.checksums.setdefault(key, {}).update(lanes)


@dataclass
class ForebayWorkerMetadata(OffloadingWorkerMetadata):
    """vLLM's completion counts plus what forebay's scheduler side must know."""

    reports: dict[int, JobReport] = field(default_factory=dict)
    """By job id."""
    loads: list[TransferResult] = field(default_factory=list)
    """Finished loads and stores, for the metrics (keys and checksums stripped)."""
    stores: list[TransferResult] = field(default_factory=list)
    health: dict[int, list[DeviceHealth]] = field(default_factory=dict)
    """By rank; only when it changed or a bandwidth was observed."""
    queue_depth: dict[str, int] = field(default_factory=dict)

    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not (self.completed_jobs or self.reports or self.health)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Combine the metadata of two ranks of one step."""
        assert isinstance(other, ForebayWorkerMetadata)
        base = super().aggregate(other)
        assert isinstance(base, OffloadingWorkerMetadata)
        merged = ForebayWorkerMetadata(base.completed_jobs, base.transfer_stats)
        for source in (self, other):
            for job, report in source.reports.items():
                merged.reports.setdefault(job, JobReport()).merge(report)
            merged.health.update(source.health)
            for name, depth in source.queue_depth.items():
                merged.queue_depth[name] = merged.queue_depth.get(name, 0) + depth
        merged.loads = self.loads + other.loads
        merged.stores = self.stores + other.stores
        return merged
