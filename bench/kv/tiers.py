"""Secondary tiers of vLLM driven alone, without an engine: vLLM's own file system tier, and ours.

Both get the same primary memory, the same keys and the same calls; neither's code is touched.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import OffloadingSpec, OffloadKey, ReqContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
from vllm.v1.kv_offload.tiering.fs import io as fs_io
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

from forebay.bench.blocked import BlockedSampler, threads
from forebay.bench.kv.session import BenchError, Memory2D, keys
from forebay.vllm_ext.tier import ForebayTier


class _Spec(OffloadingSpec):
    """What a tier reads of the engine."""

    def get_manager(self) -> Any:
        raise NotImplementedError

    def get_worker(self, kv_caches: Any) -> Any:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Cost:
    """What one load took."""

    seconds: float
    cpu_seconds: float
    """User and system time of the whole process."""
    bytes: int


def offload_keys(label: str, count: int) -> list[OffloadKey]:
    """Keys as vLLM makes them: block hash and group."""
    return [make_offload_key(key, 0) for key in keys(label, count)]


def fs_tier(memory: Memory2D, folder: Path, count: int) -> SecondaryTierManager:
    """vLLM's file system tier with `count` threads, all of which read when there is nothing to write."""
    view = memory.view()
    return FileSystemTierManager(_spec(), view, "fs", str(folder), n_read_threads=count - 1, n_write_threads=1)


def fs_tier_facts(folder: Path) -> dict[str, bool]:
    """Which of the peer's fast ways are open here."""
    return {"o_direct": fs_io.probe_o_direct(str(folder)), "c_extension": fs_io._HAS_FSIO_C}


def forebay_tier(memory: Memory2D, pool: dict[str, Any]) -> ForebayTier:
    """Our tier over a pool."""
    return ForebayTier(_spec(), memory.view(), "forebay", pool)


class Driver:
    """Stores to and loads from a tier, and measures what that costs this process.

    Args:
        make: builds the tier; the threads that appear meanwhile are the tier's.
        memory: its primary.
    """

    def __init__(self, make: Callable[[], SecondaryTierManager], memory: Memory2D) -> None:
        before = threads()
        self.tier = make()
        self.threads = threads() - before
        self.memory = memory
        self._job = 0
        self._context = ReqContext("bench")

    def store(self, names: Sequence[OffloadKey]) -> None:
        """Store row i under name i."""
        self._run(self.tier.submit_store, names, 8)

    def load(self, names: Sequence[OffloadKey], keys_per_job: int, *, check: bool = False) -> Cost:
        """Load name i into row i, in jobs of so many keys, all submitted at once."""
        if check:
            self.memory.clear()
        before = resource.getrusage(resource.RUSAGE_SELF)
        started = time.perf_counter()
        self._run(self.tier.submit_load, names, keys_per_job)
        seconds = time.perf_counter() - started
        after = resource.getrusage(resource.RUSAGE_SELF)
        if check:
            self.memory.check(len(names))
        cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
        return Cost(seconds, cpu, len(names) * self.memory.row_bytes)

    def blocked(self, names: Sequence[OffloadKey], keys_per_job: int) -> float:
        """Thread-seconds blocked in I/O during such a load. Apart from `load`, whose cost the looking would raise."""
        with BlockedSampler(self.threads) as sampler:
            self._run(self.tier.submit_load, names, keys_per_job)
        return sampler.seconds

    def _run(self, submit: Callable[[TransferJob], None], names: Sequence[OffloadKey], keys_per_job: int) -> None:
        """Submit jobs and wait for their ends, in the tier's own way."""
        starts = range(0, len(names), keys_per_job)
        for start in starts:
            part = names[start : start + keys_per_job]
            self._job += 1
            rows = np.arange(start, start + len(part))
            submit(TransferJob(self._job, part, rows, is_promotion=True, req_context=self._context))
        self.tier.drain_jobs()
        ended: list[JobResult] = list(self.tier.get_finished_jobs())
        if len(ended) != len(starts) or not all(result.success for result in ended):
            raise BenchError(f"tier {self.tier.tier_type!r} failed a job; its time means nothing")


def _spec() -> OffloadingSpec:
    parallel = OffloadingParallelConfig(
        rank=0, world_size=1, tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, data_parallel_index=0,
        data_parallel_size=1, data_parallel_rank_local=None, is_parallelism_agnostic=True,
    )  # fmt: skip
    return _Spec(
        OffloadingConfig(
            groups=(OffloadingGroupConfig(16, ("layer",), 0),),
            worker_kv_bytes_per_block=0,
            enable_kv_cache_events=False,
            extra_config={"forebay_weights": "bench"},
            engine_id="bench",
            model=OffloadingModelConfig("bench", "bfloat16"),
            cache=OffloadingCacheConfig(16, 1),
            parallel=parallel,
        )
    )
