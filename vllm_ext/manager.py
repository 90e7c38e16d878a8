"""The scheduler's side: vLLM's offloading manager on top of the pool's index."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence

from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    TierFilter,
    get_offload_group_idx,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from forebay.storage.pool import Lookup, Pool
from forebay.vllm_ext.metadata import ForebayLoadSpec, ForebayStoreSpec, ForebayWorkerMetadata, JobReport
from forebay.vllm_ext.metrics import PoolMetrics
from forebay.vllm_ext.worth import LoadJudge

logger = logging.getLogger(__name__)

_LOOKUPS = {
    Lookup.MISS: LookupResult.MISS,
    Lookup.WRITING: LookupResult.HIT_PENDING,
    Lookup.READY: LookupResult.HIT,
}


class ForebayManager(OffloadingManager):
    """Answers vLLM's scheduler from the pool. vLLM's block hashes are the keys, used as given.

    A LoRA adapter enters vLLM's hash by name only, so an adapter that was reloaded with other weights under its
    old name would hit its predecessor's blocks; the adapter's content is therefore appended to the key.

    Args:
        pool: the opened pool; closed by `shutdown`.
        segments: bytes of each layer group of a chunk on one rank.
    """

    def __init__(self, pool: Pool, segments: Sequence[int]) -> None:
        self.pool = pool
        self.metrics = PoolMetrics(pool)
        self._segments = tuple(segments)
        self._adapters: dict[str, bytes] = {}
        """Request id -> fingerprint of its LoRA adapter; requests without one are not listed."""
        self._reports: dict[OffloadKey, dict[int, tuple[int, ...]]] = {}
        """Checksums of stores that have not ended on all ranks, by pool key and lane."""
        self._failed: set[bytes] = set()
        """Keys of stores that failed on some rank and have not been completed."""
        self._late: set[bytes] = set()
        """Keys of loads that were given up on some rank and have not been completed."""
        self.judge: LoadJudge | None = None
        """Told of every load; None where all hits are loaded."""

    def set_adapter(self, req_id: str, fingerprint: bytes) -> None:
        """Keep the keys of a request with a LoRA adapter apart, by the adapter's content."""
        self._adapters[req_id] = fingerprint

    def pool_key(self, key: OffloadKey, req_context: ReqContext) -> bytes:
        """The pool's key for vLLM's: the same, but for requests with a LoRA adapter."""
        if not self._adapters:
            return key
        return key + self._adapters.get(req_context.req_id, b"")

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Hit, pending (being written) or miss; a request may rule tiers out (`kv_load_tiers`)."""
        pool_key = self.pool_key(key, req_context)
        tiers = req_context.load_tier_filter
        if tiers is not TierFilter.ALL:
            medium = Medium.CPU if self.pool.in_memory(pool_key) else Medium.STORAGE
            if not tiers.allows(medium, Locality.LOCAL):
                return LookupResult.MISS
        return _LOOKUPS[self.pool.lookup(pool_key)]

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        """Disk as soon as one stripe comes from one: that is what the hit waits for."""
        return CacheHitSource.HOST if self.pool.in_memory(self.pool_key(key, req_context)) else CacheHitSource.DISK

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Mark a prefix as used, its first chunk as the most recent."""
        self.pool.touch([self.pool_key(key, req_context) for key in keys])

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> ForebayLoadSpec:
        """Lease the chunks and say where they lie."""
        pool_keys = [self.pool_key(key, req_context) for key in keys]
        plans = {plan.key: plan for plan in self.pool.prepare_load(pool_keys)}
        spec = ForebayLoadSpec(pool_keys, [get_offload_group_idx(key) for key in keys], plans)
        if self.judge is not None:
            spec.patience = self.judge.begin(req_context.req_id, plans.values())
        return spec

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Release the leases; what failed was dropped when it was reported."""
        pool_keys = [self.pool_key(key, req_context) for key in keys]
        self.pool.complete_load(pool_keys, unread=self._late)
        self._late.difference_update(pool_keys)

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Find places for the chunks that are not in the pool; a full or busy pool takes as long a prefix as fits."""
        by_pool_key = {self.pool_key(key, req_context): key for key in keys}
        plans = self.pool.prepare_store(list(by_pool_key), self._segments)
        stored = [by_pool_key[plan.key] for plan in plans]
        spec = ForebayStoreSpec(plans, [get_offload_group_idx(key) for key in stored])
        return PrepareStoreOutput(keys_to_store=stored, store_spec=spec, evicted_keys=[])

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        """Publish the chunks that every rank has written; drop the others."""
        done: dict[bytes, list[tuple[int, ...]]] = {}
        failed: list[bytes] = []
        for key in (self.pool_key(key, req_context) for key in keys):
            lanes = self._reports.pop(OffloadKey(key), {})
            if success and key not in self._failed and len(lanes) == self.pool.lanes:
                done[key] = [lanes[lane] for lane in range(self.pool.lanes)]
            else:
                failed.append(key)
            self._failed.discard(key)
        self.pool.complete_store(done, failed)

    def absorb(self, metadata: ForebayWorkerMetadata, first_valid_job: int) -> None:
        """Take in what the workers report, before vLLM completes the jobs.

        Failed loads leave the index here, so that the request misses when it is scheduled again; otherwise it
        would hit, load and fail for ever. Jobs before `first_valid_job` belong to a cache that was reset.
        """
        for job, report in metadata.reports.items():
            if job >= first_valid_job:
                self._absorb_report(report)
        for rank, health in metadata.health.items():
            self.pool.report_health(health, rank)
        self.metrics.record(metadata)

    def _absorb_report(self, report: JobReport) -> None:
        for key, lanes in report.checksums.items():
            self._reports.setdefault(OffloadKey(key), {}).update(lanes)
        if report.failed:
            key, reason = next(iter(report.failed.items()))
            logger.warning("%d chunks failed and are computed instead (first: %s)", len(report.failed), reason)
            self._late |= report.late
            lost = report.failed.keys() - report.late
            self._failed.update(key for key in lost if self.pool.lookup(key) is Lookup.WRITING)
            self.pool.drop([key for key in lost if self.pool.lookup(key) is Lookup.READY])

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Nothing to prepare."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Nothing to clean up here: completions may still come, so the adapter is forgotten by `forget`."""

    def forget(self, live_requests: Iterable[str]) -> None:
        """Forget the adapters of requests that vLLM no longer tracks."""
        if not self._adapters:
            return
        live = set(live_requests)
        self._adapters = {req_id: adapter for req_id, adapter in self._adapters.items() if req_id in live}

    def reset_cache(self) -> None:
        """Empty this namespace."""
        self._reports.clear()
        self._failed.clear()
        self._late.clear()
        if self.judge is not None:
            self.judge.reset()
        self.pool.reset()

    def get_stats(self):  # type: ignore[no-untyped-def]  # noqa: ANN201 - vLLM's stats class, private to it
        """Metrics since the last call."""
        return self.metrics.take()

    def shutdown(self) -> None:
        """Close the pool: a clean stop needs no verification at the next start."""
        self.pool.close()
