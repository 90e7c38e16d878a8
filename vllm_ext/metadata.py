"""What travels between the scheduler's and the workers' side of the connector."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
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
    patience: float = math.inf
    """Seconds after which what has not arrived is to be computed instead."""


@dataclass
class ForebayStoreSpec(LoadStoreSpec):
    """Where the chunks of a store go, in the order vLLM will name their blocks."""

    plans: list[StorePlan]
    groups: list[int]


@dataclass
class ForebayConnectorMetadata(OffloadingConnectorMetadata):
    """What the scheduler's side tells the workers in one step."""

    probes: list[LoadPlan] = field(default_factory=list)
    """Reads that only ask how fast a device is; the key is the probe's number, 8 bytes."""
    step: int | None = None
    """Number to send back when the step is over; None when nobody wants to know."""


@dataclass
class JobReport:
    """How one job ended on one or more ranks."""

    failed: dict[bytes, str] = field(default_factory=dict)
    late: set[bytes] = field(default_factory=set)
    """Those of `failed` that only took too long."""
    checksums: dict[bytes, dict[int, tuple[int, ...]]] = field(default_factory=dict)
    """Stores: CRC-32C by key, lane and stripe."""

    def merge(self, other: JobReport) -> None:
        """Add what another rank says."""
        self.late = {key for key in self.late | other.late if self._only_late(key) and other._only_late(key)}
        self.failed.update(other.failed)
        for key, lanes in other.checksums.items():
            self.checksums.setdefault(key, {}).update(lanes)

    def _only_late(self, key: bytes) -> bool:
        return key in self.late or key not in self.failed


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
    probes: list[TransferResult] = field(default_factory=list)
    """Finished probes; the transfer is the probe's number, negative."""
    steps: set[int] = field(default_factory=set)
    """Numbers of steps that are over."""

    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not (self.completed_jobs or self.reports or self.health or self.probes or self.steps)

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
        merged.probes = self.probes + other.probes
        merged.steps = self.steps | other.steps
        return merged
