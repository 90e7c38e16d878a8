"""What every kernel must compute, in plain torch: each expert is rebuilt as a dense one and run on its tokens.

Slow on purpose: no trick of the kernels (backbone once per token, only kept units touched) is used here.
Shape letters as in `weights`; H hidden units, n tokens routed to one expert.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import gelu, silu

if TYPE_CHECKING:
    from torch import Tensor

    from forebay.kernels.parser_moe.weights import ParserWeights

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
}
"""Activation of the gate by name; "gelu" is the exact form with erf, as in transformers."""


def dequantize(matrix: Tensor, scale_rows: Tensor | None, dtype: torch.dtype) -> Tensor:
    """A copy of a matrix of the backbone in `dtype`, each row times its scale if there are any."""
    wide = matrix.to(dtype, copy=True)
    return wide if scale_rows is None else wide.mul_(scale_rows[:, None])


def expert(weights: ParserWeights, e: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Dense gate_HD, up_HD and down_DH of expert `e`, summed in `dtype`."""
    kept = slice(*weights.offsets_E1[e : e + 2].tolist())
    units = weights.indices_R[kept].long()
    gate_HD = dequantize(weights.gate_HD, weights.gate_scale_H, dtype)
    up_HD = dequantize(weights.up_HD, weights.up_scale_H, dtype)
    down_DH = dequantize(weights.down_DH, weights.down_scale_D, dtype)
    gate_HD[units] += weights.residual_gate_RD[kept].to(dtype)
    up_HD[units] += weights.residual_up_RD[kept].to(dtype)
    down_DH[:, units] += weights.residual_down_RD[kept].to(dtype).T
    return gate_HD, up_HD, down_DH


def forward(
    x_TD: Tensor, topk_weights_TK: Tensor, topk_ids_TK: Tensor, weights: ParserWeights, activation: str
) -> Tensor:
    """y_TD = sum over k of topk_weights[t, k] * expert topk_ids[t, k](x_t), in the dtype of `x_TD`.

    Computed in float32 (float64 for float64 inputs). An id outside [0, E) belongs to another rank and adds nothing.
    """
    dtype = torch.promote_types(x_TD.dtype, torch.float32)
    act = ACTIVATIONS[activation]
    y_TD = torch.zeros_like(x_TD, dtype=dtype)
    for e in range(weights.experts):
        tokens, slots = torch.where(topk_ids_TK == e)
        gate_HD, up_HD, down_DH = expert(weights, e, dtype)
        x_nD = x_TD[tokens].to(dtype)
        out_nD = (act(x_nD @ gate_HD.T) * (x_nD @ up_HD.T)) @ down_DH.T
        y_TD.index_add_(0, tokens, out_nD * topk_weights_TK[tokens, slots, None].to(dtype))
    return y_TD.to(x_TD.dtype)
