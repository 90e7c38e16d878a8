"""The reference itself, against what is known without it."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from forebay.kernels.parser_moe.reference import ACTIVATIONS, forward
from forebay.kernels.parser_moe.weights import ParserWeights
from tests.kernels.parser_layers import random_inputs, random_weights, relative_error


def mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, activation: str) -> Tensor:
    return linear(ACTIVATIONS[activation](linear(x, gate)) * linear(x, up), down)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_without_kept_units_every_expert_is_the_backbone(activation: str):
    inputs = random_inputs(7, 3, others=0)
    bare = random_weights([0] * 9, 45, 77, torch.float32, torch.Generator().manual_seed(1))
    total_T = (inputs.w_TK * (inputs.ids_TK >= 0)).sum(1)
    expected = total_T[:, None] * mlp(inputs.x_TD, bare.gate_HD, bare.up_HD, bare.down_DH, activation)
    y = forward(inputs.x_TD, inputs.w_TK, inputs.ids_TK, bare, activation)
    assert relative_error(y, expected) < 1e-5


def test_with_all_units_kept_experts_are_backbone_plus_residual():
    generator = torch.Generator().manual_seed(2)
    weights = random_weights([45, 45], 45, 77, torch.float64, generator)
    x = torch.randn(5, 77, generator=generator, dtype=torch.float64)
    part = weights.residual_gate_RD[45:], weights.residual_up_RD[45:], weights.residual_down_RD[45:].T
    gate, up, down = weights.gate_HD + part[0], weights.up_HD + part[1], weights.down_DH + part[2]
    ids = torch.ones(5, 1, dtype=torch.int64)
    y = forward(x, torch.ones(5, 1), ids, weights, "silu")
    assert relative_error(y, mlp(x, gate, up, down, "silu")) < 1e-12


def test_ids_of_other_ranks_add_nothing():
    inputs = random_inputs(7, 4)
    y = forward(*inputs, "silu")
    outside = (inputs.ids_TK < 0) | (inputs.ids_TK >= 9)
    assert outside.any()
    w_TK = inputs.w_TK.masked_fill(outside, 0.0)
    ids_TK = inputs.ids_TK.clamp(0, 8)
    assert relative_error(forward(inputs.x_TD, w_TK, ids_TK, inputs.weights, "silu"), y) < 1e-6


def test_int8_is_the_dequantized_backbone():
    inputs = random_inputs(7, 3, int8=True)
    weights = inputs.weights
    scale = [None if rows is None else rows[:, None] for rows in weights.scales]
    wide = replace(
        weights, gate_HD=weights.gate_HD * scale[0], up_HD=weights.up_HD * scale[1], down_DH=weights.down_DH * scale[2],
        gate_scale_H=None, up_scale_H=None, down_scale_D=None,
    )  # fmt: skip
    y = forward(*inputs, "silu")
    assert torch.equal(forward(*inputs[:3], wide, "silu"), y)


@pytest.mark.parametrize("int8", [False, True])
def test_weights_stay_as_they_were(int8: bool):
    inputs = random_inputs(3, 2, int8=int8)
    before = [tensor.clone() for tensor in tensors(inputs.weights)]
    forward(*inputs, "silu")
    assert all(map(torch.equal, tensors(inputs.weights), before))


def tensors(weights: ParserWeights) -> list[Tensor]:
    values = [getattr(weights, field.name) for field in fields(weights)]
    return [value for value in values if value is not None]
