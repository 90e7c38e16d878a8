"""Compressed layers and tokens with random contents, and the shapes that kernels get wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from forebay.kernels.parser_moe.weights import ParserWeights


class Inputs(NamedTuple):
    x_TD: Tensor
    w_TK: Tensor
    ids_TK: Tensor
    weights: ParserWeights


def random_weights(
    kept: Sequence[int], hidden: int, dim: int, dtype: torch.dtype, generator: torch.Generator
) -> ParserWeights:
    """Expert e keeps `kept[e]` units; values are scaled so that outputs are about 1."""

    def matrix(rows: int, columns: int, inputs: int) -> Tensor:
        return (torch.randn(rows, columns, generator=generator) * inputs**-0.5).to(dtype)

    units = [torch.randperm(hidden, generator=generator)[:count].sort().values for count in kept]
    R = sum(kept)
    return ParserWeights(
        gate_HD=matrix(hidden, dim, dim),
        up_HD=matrix(hidden, dim, dim),
        down_DH=matrix(dim, hidden, hidden),
        residual_gate_RD=matrix(R, dim, dim),
        residual_up_RD=matrix(R, dim, dim),
        residual_down_RD=matrix(R, dim, hidden),
        indices_R=torch.cat(units).int(),
        offsets_E1=torch.tensor([0, *kept]).cumsum(0).int(),
    )


def quantized(weights: ParserWeights) -> ParserWeights:
    """The same layer with its backbone in int8: any values will do, for the reference reads the same ones."""
    parts = [int8_rows(matrix) for matrix in (weights.gate_HD, weights.up_HD, weights.down_DH)]
    (gate, gate_scale), (up, up_scale), (down, down_scale) = parts
    return replace(
        weights, gate_HD=gate, up_HD=up, down_DH=down, gate_scale_H=gate_scale, up_scale_H=up_scale,
        down_scale_D=down_scale,
    )  # fmt: skip


def int8_rows(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Values from -128 to 127, and a scale for each row."""
    scale = matrix.float().abs().amax(1) / 127
    values = (matrix.float() / scale[:, None]).round().to(torch.int8)
    values[0, 0] = -128
    return values, scale


def random_inputs(
    tokens: int,
    top_k: int,
    experts: int = 9,
    hidden: int = 45,
    dim: int = 77,
    dtype: torch.dtype = torch.float32,
    others: int = 1,
    shift: int = 0,
    seed: int = 0,
    int8: bool = False,
) -> Inputs:
    """Experts keep 0, 1, all and 5 units in turn; ids run from -1 to E - 1 + `others`, of which 0 to E - 1 count."""
    generator = torch.Generator().manual_seed(seed)
    kept = [(0, 1, hidden, min(5, hidden))[(e + shift) % 4] for e in range(experts)]
    weights = random_weights(kept, hidden, dim, dtype, generator)
    if int8:
        weights = quantized(weights)
    ids_TK = torch.rand(tokens, experts + 1 + others, generator=generator).argsort(1)[:, :top_k] - 1
    x_TD = torch.randn(tokens, dim, generator=generator).to(dtype)
    return Inputs(x_TD, torch.rand(tokens, top_k, generator=generator), ids_TK.int(), weights)


def relative_error(y_TD: Tensor, expected_TD: Tensor) -> float:
    """The largest over tokens of |y - expected| / (|expected| + 1e-3), in the Euclidean norm."""
    off_T = (y_TD.double() - expected_TD.double()).norm(dim=1)
    return float((off_T / (expected_TD.double().norm(dim=1) + 1e-3)).max())
