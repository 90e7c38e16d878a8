"""The pool as a secondary tier of vLLM's own tiering: {"type": "forebay", "pool": "pool.yaml"}."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Collection, Iterable
from typing import Any, ClassVar

from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from forebay.storage.lanes import open_lane
from forebay.storage.plan import LoadPlan, Memory, StorePlan, TransferResult
from forebay.storage.pool import Lookup, Pool
from forebay.vllm_ext import metrics
from forebay.vllm_ext.metadata import ForebayWorkerMetadata
from forebay.vllm_ext.plugin import log_like_vllm
from forebay.vllm_ext.pool_config import read_pool_config
from forebay.vllm_ext.spec import namespace

logger = logging.getLogger(__name__)

_LOOKUPS = {Lookup.MISS: LookupResult.MISS, Lookup.WRITING: LookupResult.RETRY, Lookup.READY: LookupResult.HIT}


class ForebayTier(SecondaryTierManager):
    """Loads into and stores from vLLM's CPU tier, whose rows hold all ranks' bytes: one lane, one process."""

    medium: ClassVar[Medium] = Medium.STORAGE

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        """The pool's Prometheus metrics."""
        return metrics.definitions()

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        pool: Any,
        backpressure_detector: BackpressureDetector | None = None,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        log_like_vllm()
        self.locality = Locality.LOCAL
        parallel = offloading_spec.config.parallel
        config = read_pool_config({"pool": pool}, parallel.data_parallel_index, parallel.data_parallel_size)
        self._pool = Pool.open(config, namespace(offloading_spec.config))
        self._engine = open_lane(config)
        self._metrics = metrics.PoolMetrics(self._pool)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(primary_kv_view.cast("B")))
        self._engine.register(self._address, primary_kv_view.nbytes)
        self._jobs: dict[int, tuple[TransferJob, bool]] = {}
        """Jobs on their way, each with whether it is a load."""
        self._drained: list[TransferResult] = []
        logger.info("forebay tier is live: %d chunks warm", self._pool.stats().chunks)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Hit, retry (being written) or miss."""
        return _LOOKUPS[self._pool.lookup(key)]

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Mark a prefix as used."""
        self._pool.touch(list(keys))

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Write the chunks that are not in the pool; those that do not fit are left out."""
        rows = self._rows(job_metadata)
        plans = self._pool.prepare_store(list(rows), (self.block_size_bytes,))
        chunks: list[tuple[StorePlan, Memory]] = [(plan, rows[plan.key]) for plan in plans]
        self._jobs[job_metadata.job_id] = (job_metadata, False)
        self._engine.submit_store(job_metadata.job_id, chunks)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Read chunks into rows of the CPU tier."""
        rows = self._rows(job_metadata)
        plans = self._pool.prepare_load(list(rows))
        chunks: list[tuple[LoadPlan, Memory]] = [(plan, rows[plan.key]) for plan in plans]
        found = {plan.key for plan in plans} if len(plans) < len(rows) else rows.keys()
        missing = {key: "no longer in the pool" for key in rows if key not in found}
        self._jobs[job_metadata.job_id] = (job_metadata, True)
        self._engine.submit_load(job_metadata.job_id, chunks, failed=missing)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Jobs that have ended, failed keys left out of `successful_keys`."""
        drained, self._drained = self._drained, []
        return self._end(drained + self._engine.poll())

    def drain_jobs(self) -> None:
        """Wait for everything on its way; the results stay for `get_finished_jobs`."""
        self._drained += self._engine.wait()

    def has_pending_work(self) -> bool:
        """Whether vLLM must keep stepping for a completion."""
        return bool(self._jobs)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Nothing to prepare."""
        return RequestOffloadingContext()

    def get_stats(self):  # type: ignore[no-untyped-def]  # noqa: ANN201 - vLLM's stats class, private to it
        """Metrics since the last call."""
        return self._metrics.take()

    def shutdown(self) -> None:
        """Stop the devices and close the pool."""
        self._engine.close()
        self._pool.close()

    def _rows(self, job: TransferJob) -> dict[bytes, Memory]:
        """The row of the CPU tier that each key of a job is in, or goes to."""
        start, size = self._address, self.block_size_bytes
        return {
            bytes(key): [(start + row * size, size)] for key, row in zip(job.keys, map(int, job.chunk_ids), strict=True)
        }

    def _end(self, results: Iterable[TransferResult]) -> list[JobResult]:
        ended: list[JobResult] = []
        report = ForebayWorkerMetadata(health={0: self._engine.health()})
        for result in results:
            job, is_load = self._jobs.pop(result.transfer)
            if is_load:
                self._pool.complete_load(job.keys, result.failed)
                report.loads.append(result)
            else:
                self._pool.complete_store({key: [lane] for key, lane in result.checksums.items()}, result.failed)
                report.stores.append(result)
            ended.append(_job_result(job, result))
        if ended:
            self._pool.report_health(report.health[0])
            self._metrics.record(report)
        return ended


def _job_result(job: TransferJob, result: TransferResult) -> JobResult:
    good = [key for key in job.keys if key not in result.failed] if result.failed else None
    return JobResult(
        job_id=job.job_id,
        success=not result.failed,
        successful_keys=good or None,
        transfer_time=result.seconds,
        transfer_bytes=result.bytes,
    )
