"""The torch operator `torch.ops.forebay.parser_moe`: what engines call, visible to torch.compile as one node.

Importing this module registers it, once per process however often it is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forebay.kernels.parser_moe.reference import ACTIVATIONS
from forebay.kernels.parser_moe.weights import ParserWeights

if TYPE_CHECKING:
    from torch import Tensor

NAME = "forebay::parser_moe"
SCHEMA = (
    "(Tensor x, Tensor topk_weights, Tensor topk_ids, Tensor gate, Tensor up, Tensor down, Tensor residual_gate,"
    " Tensor residual_up, Tensor residual_down, Tensor indices, Tensor offsets, str activation,"
    " Tensor? gate_scale=None, Tensor? up_scale=None, Tensor? down_scale=None) -> Tensor"
)


def parser_moe(
    x_TD: Tensor, topk_weights_TK: Tensor, topk_ids_TK: Tensor, weights: ParserWeights, activation: str
) -> Tensor:
    """y_TD of a compressed MoE layer, through the operator; the contract is that of `reference.forward`."""
    result: Tensor = torch.ops.forebay.parser_moe(
        x_TD, topk_weights_TK, topk_ids_TK, weights.gate_HD, weights.up_HD, weights.down_DH, weights.residual_gate_RD,
        weights.residual_up_RD, weights.residual_down_RD, weights.indices_R, weights.offsets_E1, activation,
        *weights.scales,
    )  # fmt: skip
    return result


def check(x_TD: Tensor, topk_ids_TK: Tensor, weights: ParserWeights, activation: str) -> None:
    """Raise ValueError on what a kernel would answer with wrong numbers or a fault."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is not one of {', '.join(ACTIVATIONS)}")
    if x_TD.shape != (topk_ids_TK.shape[0], weights.gate_HD.shape[1]):
        raise ValueError(
            f"x is {tuple(x_TD.shape)}, topk_ids {tuple(topk_ids_TK.shape)} and gate {tuple(weights.gate_HD.shape)}:"
            " x must be tokens x model dimension"
        )
    if [scale is None for scale in weights.scales] != [weights.gate_HD.dtype is not torch.int8] * 3:
        raise ValueError(f"a backbone of {weights.gate_HD.dtype}: int8 has three tensors of scales, other types none")
    ragged = weights.residual_gate_RD, weights.residual_up_RD, weights.residual_down_RD, weights.indices_R
    if not all(tensor.is_contiguous() for tensor in ragged):
        raise ValueError("residual tensors and indices must be contiguous: call .contiguous() once, after loading")


def split(tensors_and_activation: tuple[Any, ...]) -> tuple[ParserWeights, str]:
    """The operator's arguments after the routing; scales that are None may be left out at the end."""
    tensors, (activation, *scales) = tensors_and_activation[:8], tensors_and_activation[8:]
    return ParserWeights(*tensors, *scales), activation


def fake(x: Tensor, topk_weights: Tensor, topk_ids: Tensor, *rest: Any) -> Tensor:
    """What torch.compile needs to know of the result."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def cpu(x: Tensor, topk_weights: Tensor, topk_ids: Tensor, *rest: Any) -> Tensor:
    """The operator on a CPU."""
    from forebay.kernels.parser_moe import cpu

    return cpu.forward(x, topk_weights, topk_ids, *split(rest))


def cuda(x: Tensor, topk_weights: Tensor, topk_ids: Tensor, *rest: Any) -> Tensor:
    """The operator on a GPU."""
    from forebay.kernels.parser_moe import triton_forward

    weights, activation = split(rest)
    check(x, topk_ids, weights, activation)
    return triton_forward.forward(x, topk_weights, topk_ids, weights, activation)


def register() -> None:
    """Register the operator, unless this process has it already."""
    if hasattr(torch.ops.forebay, "parser_moe"):
        return
    torch.library.define(NAME, SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(NAME, "CPU", cpu)
    torch.library.impl(NAME, "CUDA", cuda)
    torch.library.register_fake(NAME, fake)


register()
