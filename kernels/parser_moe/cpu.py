"""Forward pass on the CPU: our C kernels, found by what the processor can do.

Two parallel loops, both free of conflicts, so that results do not depend on the number of threads:

* over hidden units: the backbone's gate and up rows for all tokens, then per expert its kept units among them;
* over columns of the output: the backbone's down for all tokens, then per expert the down rows of its kept units.

Weights and tokens are read as they lie, row-major, in their own types and converted in registers; everything between
is float32. The scales of an int8 backbone are applied to the finished products.
Shape letters as in `weights.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from forebay.kernels import _cpu
from forebay.kernels.cpu import ELEMENTS, VARIANTS

if TYPE_CHECKING:
    from torch import Tensor

    from forebay.kernels.parser_moe.weights import ParserWeights

INT8 = 3
"""The number of the elements of an int8 backbone."""
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}


def forward(
    x_TD: Tensor,
    topk_weights_TK: Tensor,
    topk_ids_TK: Tensor,
    weights: ParserWeights,
    activation: str,
    *,
    variant: str = VARIANTS[0],
) -> Tensor:
    """The routed experts' output for every token, in the type of `x_TD`.

    Args:
        x_TD: tokens, of any floating type.
        topk_weights_TK: the router's weight of each chosen expert.
        topk_ids_TK: the chosen experts; others than 0 to E - 1 are skipped.
        weights: contiguous, all float32, all bfloat16 or all float16; or so but for a backbone in int8 with scales.
        activation: `silu`, `gelu` (with erf) or `gelu_tanh`.
        variant: one of `VARIANTS`.

    Raises:
        ValueError: a shape, a type, the layout or the activation is not one of these.
    """
    sizes = _sizes(x_TD, topk_weights_TK, topk_ids_TK, weights)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; the kernels know {', '.join(ACTIVATIONS)}")
    read_TD = (x_TD if x_TD.dtype in ELEMENTS else x_TD.to(torch.float32)).contiguous()
    y_TD = torch.empty_like(read_TD)
    routing = topk_weights_TK.to(torch.float32).contiguous(), topk_ids_TK.to(torch.int32).contiguous()
    tensors = y_TD, read_TD, *routing, *_tensors(weights)
    scales = [0 if scale is None else scale.data_ptr() for scale in weights.scales]
    addresses = (*(tensor.data_ptr() for tensor in tensors), *scales)
    backbone = ELEMENTS.get(weights.gate_HD.dtype, INT8)
    elements = backbone, ELEMENTS[weights.residual_gate_RD.dtype], ELEMENTS[read_TD.dtype]
    _cpu.forward(variant, elements, ACTIVATIONS[activation], torch.get_num_threads(), addresses, sizes)
    return y_TD.to(x_TD.dtype)


def _tensors(weights: ParserWeights) -> tuple[Tensor, ...]:
    return (
        weights.gate_HD,
        weights.up_HD,
        weights.down_DH,
        weights.residual_gate_RD,
        weights.residual_up_RD,
        weights.residual_down_RD,
        weights.indices_R,
        weights.offsets_E1,
    )


def _sizes(x_TD: Tensor, topk_weights_TK: Tensor, topk_ids_TK: Tensor, weights: ParserWeights) -> tuple[int, ...]:
    """T, K, E, H, D and R, after checking that everything has the shape, type and layout that the kernels read."""
    (tokens, model), (top_k, hidden) = x_TD.shape, (topk_ids_TK.shape[1], weights.gate_HD.shape[0])
    kept, experts = weights.indices_R.shape[0], weights.experts
    if topk_weights_TK.shape != (tokens, top_k) or topk_ids_TK.shape != (tokens, top_k):
        raise ValueError(
            f"router weights {tuple(topk_weights_TK.shape)} and ids {tuple(topk_ids_TK.shape)} must both be "
            f"({tokens}, K) for {tokens} tokens"
        )
    dtype, backbone = weights.residual_gate_RD.dtype, weights.gate_HD.dtype
    if dtype not in ELEMENTS:
        raise ValueError(f"weights are {dtype}; the CPU kernels read float32, bfloat16 and float16")
    scales = [scale for scale in weights.scales if scale is not None]
    if len(scales) != (3 if backbone is torch.int8 else 0):
        raise ValueError(f"a backbone of {backbone} with {len(scales)} scales; int8 has 3, other types none")
    rows, columns, kept_rows = (hidden, model), (model, hidden), (kept, model)
    of_scales = (hidden,), (hidden,), (model,)
    shapes = (rows, rows, columns, kept_rows, kept_rows, kept_rows, (kept,), (experts + 1,), *of_scales)
    backbone = torch.int8 if scales else dtype
    types = (backbone,) * 3 + (dtype,) * 3 + (torch.int32,) * 2 + (torch.float32,) * 3
    for number, tensor in enumerate((*_tensors(weights), *scales)):
        if (
            tensor.shape != shapes[number]
            or tensor.dtype is not types[number]
            or not tensor.is_contiguous()
            or not tensor.is_cpu
        ):
            raise ValueError(
                f"{weights.__slots__[number]} is {tensor.dtype} of shape {tuple(tensor.shape)}, strides "
                f"{tensor.stride()}, on {tensor.device}; the kernels need contiguous {types[number]} of shape "
                f"{shapes[number]} in host memory"
            )
    return tokens, top_k, experts, hidden, model, kept
