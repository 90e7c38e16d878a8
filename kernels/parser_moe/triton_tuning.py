"""Block sizes of the Triton kernels: what may be chosen, and the choice, measured once per shape.

The first configuration of each list is the default; tests compile it for every card that we name and find no register
spilled. A shape first seen while a CUDA graph is captured takes the default, since nothing can be timed then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import triton
from triton.runtime.errors import OutOfResources

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Blocks:
    """How one launch is cut: units and columns of D at a time, warps, and stages of the load pipeline."""

    r: int
    d: int
    warps: int = 4
    stages: int = 3

    def options(self) -> dict[str, int | bool]:
        """What a launch is given beside its arguments; a b + c in one step, which newer Tritons must be asked for."""
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}


PLAIN = Blocks(0, 0)
"""For kernels that are not cut by units and columns."""

HIDDEN_FEW = (Blocks(4, 512), Blocks(8, 256), Blocks(4, 256), Blocks(2, 1024))
DOWN_FEW = (Blocks(64, 32), Blocks(128, 32), Blocks(256, 32, warps=8), Blocks(256, 16))
HIDDEN_MANY = {
    16: (Blocks(32, 128), Blocks(64, 128), Blocks(32, 256)),
    32: (Blocks(32, 128), Blocks(64, 64), Blocks(64, 128)),
    64: (Blocks(64, 64, warps=8), Blocks(32, 64), Blocks(32, 128)),
    128: (Blocks(64, 64, warps=8), Blocks(64, 64, warps=8, stages=4), Blocks(32, 64, warps=8)),
}
"""By BLOCK_T, the pairs of a block."""
DOWN_MANY = {
    16: (Blocks(32, 128), Blocks(64, 128), Blocks(64, 64)),
    32: (Blocks(32, 128), Blocks(64, 128), Blocks(64, 64)),
    64: (Blocks(32, 128), Blocks(64, 128), Blocks(64, 64)),
    128: (Blocks(32, 128, warps=8), Blocks(64, 128, warps=8), Blocks(64, 64)),
}
BACKBONE_INT8 = {
    16: (Blocks(16, 128), Blocks(32, 128), Blocks(64, 128), Blocks(16, 256)),
    32: (Blocks(32, 128), Blocks(64, 128), Blocks(16, 128)),
    64: (Blocks(64, 128), Blocks(64, 64), Blocks(32, 128)),
    128: (Blocks(64, 64, warps=8), Blocks(64, 128, warps=8), Blocks(64, 64)),
}
"""By tokens of a block; rows of weights are `r`, columns `d`."""
FLOAT32 = (Blocks(32, 32, stages=2),)
"""Many tokens in float32, without tensor cores: for checks, not for speed."""

_chosen: dict[tuple[object, ...], Blocks] = {}


def many(table: Mapping[int, tuple[Blocks, ...]], block_t: int, dtype: torch.dtype) -> tuple[Blocks, ...]:
    """Configurations of a kernel for many tokens."""
    return FLOAT32 if dtype == torch.float32 else table[block_t]


def choose(key: tuple[object, ...], candidates: Sequence[Blocks], launch: Callable[[Blocks], object]) -> Blocks:
    """The fastest of `candidates` for `key`, timed on the first call; `launch` must be fit to run many times."""
    if key in _chosen:
        return _chosen[key]
    if len(candidates) == 1 or not torch.cuda.is_available() or torch.cuda.is_current_stream_capturing():
        return candidates[0]
    times = {blocks: milliseconds(blocks, launch) for blocks in candidates}
    _chosen[key] = min(times, key=times.__getitem__)
    log.debug("%s takes %s: %.3f ms", key, _chosen[key], times[_chosen[key]])
    return _chosen[key]


def milliseconds(blocks: Blocks, launch: Callable[[Blocks], object]) -> float:
    """Time of one launch; infinite where the card has too little shared memory or too few registers."""
    try:
        return float(triton.testing.do_bench(lambda: launch(blocks), warmup=5, rep=20))
    except OutOfResources:
        return float("inf")
