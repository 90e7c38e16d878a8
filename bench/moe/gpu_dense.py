"""The dense layer on a GPU, by the best that is installed: vLLM's fused MoE, PyTorch's grouped product, or a loop.

Shape letters as in the kernels; I = 2 H, P = T K pairs of a token and an expert, n pairs of one expert.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import silu

from forebay.bench.moe.gpu_check import LIMITS, worst
from forebay.bench.moe.layer import Routed
from forebay.kernels.parser_moe.reference import expert
from forebay.kernels.parser_moe.weights import ParserWeights
from forebay.storage.errors import ForebayError


@dataclass(frozen=True, slots=True)
class Dense:
    """All experts of a layer, in the layout that all three ways read."""

    w13_EID: Tensor
    """Gate, then up."""
    w2_EDH: Tensor


Arm: TypeAlias = Callable[[Dense, Routed], Tensor]


def rebuild(weights: ParserWeights) -> Dense:
    """The dense layer that a compressed one stands for, on the same device."""
    dtype, (hidden, model) = weights.residual_gate_RD.dtype, weights.gate_HD.shape
    w13_EID = weights.gate_HD.new_empty(weights.experts, 2 * hidden, model, dtype=dtype)
    w2_EDH = weights.gate_HD.new_empty(weights.experts, model, hidden, dtype=dtype)
    for e in range(weights.experts):
        w13_EID[e, :hidden], w13_EID[e, hidden:], w2_EDH[e] = expert(weights, e, dtype)
    return Dense(w13_EID, w2_EDH)


def by_vllm(dense: Dense, batch: Routed) -> Tensor:
    """vLLM's Triton kernel with the block sizes that vLLM has for this card and layer."""
    from vllm.model_executor.layers.fused_moe import fused_experts

    return fused_experts(batch.x_TD, dense.w13_EID, dense.w2_EDH, batch.weights_TK, batch.ids_TK)


def by_grouped_product(dense: Dense, batch: Routed) -> Tensor:
    """PyTorch's grouped matrix product on the pairs sorted by expert."""
    (tokens, top_k), experts = batch.ids_TK.shape, dense.w13_EID.shape[0]
    ids_P, order_P = batch.ids_TK.flatten().sort(stable=True)
    every_E = torch.arange(experts, dtype=ids_P.dtype, device=ids_P.device)
    ends_E = torch.searchsorted(ids_P, every_E, right=True).int()
    multiply = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    g_PH, u_PH = multiply(batch.x_TD[order_P // top_k], dense.w13_EID.transpose(1, 2), offs=ends_E).chunk(2, 1)
    y_PD = multiply(silu(g_PH) * u_PH, dense.w2_EDH.transpose(1, 2), offs=ends_E)
    in_turn_PD = torch.empty_like(y_PD).index_copy_(0, order_P, y_PD)
    return torch.bmm(batch.weights_TK[:, None].to(y_PD.dtype), in_turn_PD.view(tokens, top_k, -1)).squeeze(1)


def by_loop(dense: Dense, batch: Routed) -> Tensor:
    """One expert after the other."""
    y_TD = torch.zeros_like(batch.x_TD)
    for e in range(dense.w13_EID.shape[0]):
        tokens, slots = torch.where(batch.ids_TK == e)
        g_nH, u_nH = (batch.x_TD[tokens] @ dense.w13_EID[e].T).chunk(2, 1)
        out_nD = (silu(g_nH) * u_nH) @ dense.w2_EDH[e].T
        y_TD.index_add_(0, tokens, out_nD * batch.weights_TK[tokens, slots, None].to(out_nD.dtype))
    return y_TD


ARMS: Mapping[str, Arm] = {
    "vLLM fused_experts": by_vllm,
    "torch grouped_mm": by_grouped_product,
    "torch loop over experts": by_loop,
}
"""Best first."""


def pick(arms: Mapping[str, Arm], dense: Dense, batch: Routed, expected_TD: Tensor) -> tuple[str, Arm, dict[str, str]]:
    """The first way that runs here and agrees with what is expected, and why those before it do not.

    Raises:
        ForebayError: none does.
    """
    reasons: dict[str, str] = {}
    for name, arm in arms.items():
        try:
            error = worst(arm(dense, batch), expected_TD)
        except Exception as problem:  # whatever an engine's installation may raise
            reasons[name] = f"{type(problem).__name__}: {' '.join(str(problem).split())[:300]}"
            continue
        if error <= LIMITS[batch.x_TD.dtype]:
            return name, arm, reasons
        reasons[name] = f"differs from the reference by {error:.2g}"
    raise ForebayError(f"no dense layer runs here: {reasons}")
