"""The worker's side: vLLM's transfer jobs become loads and stores of the pool's transfer engine."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
)
from vllm.v1.kv_offload.base import TransferResult as VllmTransferResult

from forebay.storage.plan import LoadPlan, Memory, StorePlan, TransferResult
from forebay.storage.transfer import TransferEngine
from forebay.vllm_ext.layout import ChunkLayout
from forebay.vllm_ext.metadata import ForebayLoadSpec, ForebayStoreSpec

logger = logging.getLogger(__name__)

FLUSH_PATIENCE = 0.25
"""Seconds that a flush waits for stores before it drops those that have not started (our choice)."""
PROBE_PATIENCE = 0.05
"""Seconds that a probe may take: a request may be waiting for what it says (our choice)."""


class ForebayWorker(OffloadingWorker):
    """Runs loads and stores in one worker process, straight between the KV tensors and the devices.

    A job never fails as a whole towards vLLM, whose worker would stop on it: `take_results` says which keys
    failed, and `failed_blocks` which blocks they were to fill.
    """

    def __init__(
        self, engine: TransferEngine, kv_caches: CanonicalKVCaches, layout: ChunkLayout, *, register: bool = True
    ) -> None:
        self.engine = engine
        self.layout = layout
        self._blocks: dict[int, dict[bytes, list[int]]] = {}
        """Target blocks of each key of each load on its way."""
        self._results: list[TransferResult] = []
        storages = {tensor.tensor.untyped_storage().data_ptr(): tensor.tensor for tensor in kv_caches.tensors}
        for address, tensor in storages.items() if register else ():
            engine.register(address, tensor.untyped_storage().nbytes())

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """Start reading the chunks of `src_spec` into the blocks of `dst_spec`."""
        assert isinstance(src_spec, ForebayLoadSpec)
        chunks: list[tuple[LoadPlan, Memory]] = []
        blocks: dict[bytes, list[int]] = {}
        missing: dict[bytes, str] = {}
        targets = self.layout.chunks(src_spec.groups, dst_spec)
        for key, group, ids in zip(src_spec.keys, src_spec.groups, targets, strict=True):
            blocks[key] = [block for block in ids if block is not None]
            plan = src_spec.plans.get(key)
            problem = "no longer in the pool" if plan is None else self._misfit(group, plan_length(plan))
            if plan is None or problem:
                missing[key] = problem
            else:
                chunks.append((plan, self.layout.memory(group, ids, plan_length(plan))))
        self._blocks[job_id] = blocks
        self.engine.submit_load(job_id, chunks, failed=missing, patience=src_spec.patience)
        return True

    def submit_probe(self, probe: LoadPlan) -> None:
        """Read and throw away; the result comes as a transfer with the probe's number, negative."""
        self.engine.submit_load(
            -int.from_bytes(probe.key, "big"), [(probe, [(0, plan_length(probe))])], patience=PROBE_PATIENCE
        )

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        """Start writing the blocks of `src_spec` to the places of `dst_spec`."""
        assert isinstance(dst_spec, ForebayStoreSpec)
        chunks: list[tuple[StorePlan, Memory]] = []
        misfits: dict[bytes, str] = {}
        sources = self.layout.chunks(dst_spec.groups, src_spec)
        for plan, group, ids in zip(dst_spec.plans, dst_spec.groups, sources, strict=True):
            if problem := self._misfit(group, plan_length(plan)):
                misfits[plan.key] = problem
            else:
                chunks.append((plan, self.layout.memory(group, ids, plan_length(plan))))
        self.engine.submit_store(job_id, chunks, failed=misfits)
        return True

    def take_results(self) -> list[TransferResult]:
        """Jobs that have ended since the last call, with their failed keys."""
        results = self._results + self.engine.poll()
        self._results = []
        return results

    def rest(self, seconds: float) -> None:
        """Sleep, unless every transfer ends before."""
        self._results += self.engine.wait(timeout=seconds)

    def failed_blocks(self, result: TransferResult) -> set[int]:
        """The blocks that a finished load did not fill; forgets the load."""
        blocks = self._blocks.pop(result.transfer, {})
        return {block for key in result.failed for block in blocks.get(key, ())}

    def get_finished(self) -> list[VllmTransferResult]:
        """Required by vLLM's interface; our connector uses `take_results`, which also tells failures."""
        return [
            VllmTransferResult(result.transfer, True, result.bytes, result.seconds) for result in self.take_results()
        ]

    def wait(self, job_ids: Iterable[int]) -> None:
        """Let go of the blocks of these jobs before vLLM reuses them.

        Stores that have not started after `FLUSH_PATIENCE` are dropped: a lost store is a later miss, a stalled
        engine is not acceptable.
        """
        jobs = set(job_ids)
        self._results += self.engine.wait(jobs, timeout=FLUSH_PATIENCE)
        if self.engine.pending(jobs):
            self.engine.cancel(jobs)
            self._results += self.engine.wait(jobs, timeout=self.engine.config.faults.deadline)

    def shutdown(self) -> None:
        """Stop the devices."""
        self.engine.close()

    def _misfit(self, group: int, length: int) -> str:
        """Why a chunk of the pool cannot hold this rank's pages; empty when it can."""
        mine = self.layout.chunk_bytes(group)
        if mine <= length:
            return ""
        return f"a chunk of group {group} has {mine} bytes on this rank but {length} in the pool"


def plan_length(plan: LoadPlan | StorePlan) -> int:
    """Bytes of the chunk that a plan describes."""
    last = plan.spans[-1]
    return last.offset + last.length
