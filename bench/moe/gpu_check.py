"""The kernels against the reference in float64, on small layers: right, without waiting for the device, in a graph.

Experts keep 0, 1, all and 5 units in turn, and some ids are of other ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from forebay.bench.moe.gpu_clock import capture, load, moved, waits
from forebay.bench.moe.layer import Routed, Sizes, in_int8, random_weights, route
from forebay.kernels.parser_moe import reference
from forebay.kernels.parser_moe.weights import ParserWeights

Forward: TypeAlias = Callable[[Tensor, Tensor, Tensor, ParserWeights, str], Tensor]

LIMITS = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""Relative error of the worst token: about what rounding between the kernels' steps makes (our choice)."""
EXPERTS, HIDDEN, MODEL = 60, 200, 264
SHAPES = ((1, 4), (8, 4), (64, 8), (512, 4))
"""T and K: twice the variant for few tokens, then blocks of 16 and of 64 pairs."""


@dataclass(frozen=True, slots=True)
class Case:
    """One check."""

    tokens: int
    top_k: int
    dtype: torch.dtype
    activation: str = "silu"
    tuned: bool = False
    """Whether block sizes are chosen as they are for a user; otherwise the default ones run."""
    int8: bool = False
    """Whether the backbone is."""

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        tuned = ", block sizes chosen" if self.tuned else ""
        int8 = ", int8 backbone" if self.int8 else ""
        return f"T {self.tokens}, K {self.top_k}, {kind}, {self.activation}{tuned}{int8}"


def cases(dtypes: tuple[torch.dtype, ...]) -> tuple[Case, ...]:
    """All checks in some types, the first of which is the one served."""
    plain = [Case(tokens, top_k, dtype) for dtype in dtypes for tokens, top_k in SHAPES]
    return (
        *plain,
        Case(8, 4, dtypes[0], "gelu"),
        Case(8, 4, dtypes[0], "gelu_tanh"),
        Case(8, 4, dtypes[0], tuned=True),
        *(Case(tokens, 4, dtypes[0], int8=True) for tokens in (1, 64, 512)),
    )


def check(case: Case, device: torch.device, forward: Forward) -> dict[str, Any]:
    """What was found: errors, their limit, whether the host waited, and `ok`."""
    random = torch.Generator().manual_seed(case.tokens)
    sizes = Sizes(EXPERTS, case.top_k, HIDDEN, MODEL)
    kept_E = torch.tensor([(0, 1, HIDDEN, 5)[e % 4] for e in range(EXPERTS)])
    plain = random_weights(sizes, kept_E, case.dtype, random)
    weights = moved(in_int8(plain) if case.int8 else plain, device)
    batch, other = (moved(_with_strangers(route(case.tokens, sizes, case.dtype, random)), device) for _ in range(2))

    def call() -> Tensor:
        return forward(batch.x_TD, batch.weights_TK, batch.ids_TK, weights, case.activation)

    limit = LIMITS[case.dtype]
    found: dict[str, Any] = {"case": str(case), "limit": limit}
    errors = [worst(call(), exact(batch, weights, case.activation))]
    if device.type == "cuda":
        found["waits"] = waits(call)
        if not found["waits"]:
            errors.append(_graph_error(call, batch, other, exact(other, weights, case.activation)))
    found |= dict(zip(("error", "error_in_graph"), errors, strict=False))
    found["ok"] = all(error <= limit for error in errors) and not found.get("waits", False)
    return found


def _with_strangers(batch: Routed) -> Routed:
    """Some ids become those of experts that another rank has."""
    ids = batch.ids_TK.view(-1)
    ids[3::7], ids[5::11] = -1, EXPERTS
    return batch


def _graph_error(call: Callable[[], Tensor], batch: Routed, other: Routed, expected_TD: Tensor) -> float:
    """Error of a graph that was captured with one batch and is replayed with another."""
    replay, output_TD = capture(call)
    load(batch, other)
    replay()
    torch.cuda.synchronize()
    return worst(output_TD, expected_TD)


def exact(batch: Routed, weights: ParserWeights, activation: str, dtype: torch.dtype = torch.float64) -> Tensor:
    """The reference's answer, computed and returned in `dtype`."""
    return reference.forward(batch.x_TD.to(dtype), batch.weights_TK, batch.ids_TK, weights, activation)


def worst(found_TD: Tensor, expected_TD: Tensor) -> float:
    """The largest relative error of a token, infinite where a number is none; tokens of almost 0 count as if larger."""
    norm_T = expected_TD.double().norm(dim=1)
    off_T = (found_TD.double() - expected_TD.double()).norm(dim=1)
    error = float((off_T / norm_T.clamp(min=max(float(norm_T.max()) * 1e-2, 1e-30))).max())
    return error if math.isfinite(error) else math.inf
