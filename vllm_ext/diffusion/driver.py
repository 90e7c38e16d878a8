"""Runs a runtime as the scheduler's steps say, and reports what came of it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsLists

from forebay.diffusion.errors import DiffusionError
from forebay.diffusion.logprobs import Logprobs
from forebay.diffusion.runtime import Block, Running, Runtime
from forebay.vllm_ext.diffusion.messages import BlockDone, Counts, DiffusionOutput, DiffusionStep, Entering, Started


class Driver:
    """One rank's."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._queued: dict[str, Running] = {}
        """Requests that have not left the runtime's queue."""

    def run(self, step: DiffusionStep) -> DiffusionOutput:
        """Take in what came, forget what left, and make forward passes until a block is final."""
        for name in step.leaving:
            self.runtime.abort(name)
            self._queued.pop(name, None)
        if step.forget_prefixes:
            self.runtime.cache.clear()
        failed = {one.name: error for one in step.entering if (error := self._submit(one))}
        blocks: list[Block] = []
        started: list[Started] = []
        passes = 0
        while passes < step.passes and not blocks and not self.runtime.idle:
            blocks = self.runtime.step()
            started += self._find_started()
            passes += 1
        return DiffusionOutput(
            req_ids=[],
            req_id_to_index={},
            blocks=[_done(block) for block in blocks],
            started=started,
            failed=failed,
            counts=_count(self.runtime),
            passes=passes,
        )

    def _submit(self, one: Entering) -> str | None:
        """Hand a request to the runtime; why not, if it refuses."""
        try:
            self.runtime.submit(one.name, torch.tensor(one.prompt), one.settings, one.prefix)
        except DiffusionError as error:
            return str(error)
        self._queued[one.name] = self.runtime.waiting[-1]
        return None

    def _find_started(self) -> list[Started]:
        """Requests that the last pass took in, and which of them found the states of their prefix."""
        waiting = {one.name for one in self.runtime.waiting}
        entered = [one for name, one in self._queued.items() if name not in waiting]
        self._queued = {name: one for name, one in self._queued.items() if name in waiting}
        return [Started(one.name, one.cached, one.request.passes.depth if one.request else 0) for one in entered]


def _count(runtime: Runtime) -> Counts:
    passes, cache, space = runtime.statistics, runtime.cache, runtime.settings.request_bytes
    return Counts(
        prefix_hits=cache.statistics.hits,
        prefix_misses=cache.statistics.misses,
        prefix_restored=cache.statistics.restored,
        prefix_evictions=cache.statistics.evictions,
        passes=passes.steps,
        steps=passes.passes,
        refreshes=passes.refreshes,
        tokens=passes.tokens,
        audits=passes.audits,
        guard_interventions=passes.interventions,
        depths=dict(passes.depths),
        prefixes=len(cache),
        state_bytes=cache.bytes,
        pool_bytes=cache.store.bytes if cache.store else 0,
        usage=sum(one.bytes for one in runtime.running) / space if space else 0.0,
    )


def _done(block: Block) -> BlockDone:
    logprobs = None if block.logprobs is None else _lists(block.tokens_N, block.logprobs)
    return BlockDone(block.name, block.tokens_N.tolist(), block.last, logprobs)


def _lists(tokens_N: Tensor, found: Logprobs) -> LogprobsLists:
    """As vLLM wants them: the chosen token first, then the best ones."""
    tokens_N1, chosen_N1 = tokens_N.cpu()[:, None], found.chosen_N[:, None]
    return LogprobsLists(
        torch.cat([tokens_N1, found.tokens_NK], dim=1).numpy().astype(np.int32),
        torch.cat([chosen_N1, found.values_NK], dim=1).numpy(),
        found.ranks_N.numpy(),
    )
