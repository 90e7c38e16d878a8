"""How much an expert's output suffers when one of its units becomes the backbone's (PARSER, arXiv 2609.00575)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from forebay.compression.experts import Expert

CHUNK = 256
"""Rows scored at a time; sums are float32 over chunks, as published."""

Activation = Callable[[Tensor], Tensor]

ACTIVATIONS: dict[str, Activation] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


@dataclass(frozen=True, slots=True)
class Hidden:
    """Second moments of an expert's hidden units over its calibration rows, each (H,)."""

    full: Tensor
    """Mean of the square of the expert's own."""
    base: Tensor
    """Mean of the square of the backbone's."""
    both: Tensor
    """Mean of their product."""


def hidden(rows_ND: Tensor, expert: Expert, activation: Activation = functional.silu) -> Tensor:
    """act(gate x) * (up x) for every row: (N, H)."""
    return activation(rows_ND @ expert.gate_HD.T) * (rows_ND @ expert.up_HD.T)


def output_importance(rows_ND: Tensor, full: Expert, base: Expert, activation: Activation = functional.silu) -> Tensor:
    """Mean squared change of the expert's output when unit j takes the backbone's weights in all three matrices.

    I[j] = E[hf^2] |wf|^2 + E[hb^2] |wb|^2 - 2 E[hf hb] <wf, wb>, which is E |hf wf - hb wb|^2; never below 0. What
    several units do together is not seen.

    Args:
        rows_ND: inputs of this expert.
        full: the expert, aligned with the backbone, float32.
        base: the backbone, float32.
        activation: of the gate.

    Returns:
        (H,), float32.
    """
    moments = _moments(rows_ND, full, base, activation)
    own, shared = full.down_DH, base.down_DH
    kept = moments.full * own.square().sum(0) + moments.base * shared.square().sum(0)
    return (kept - 2 * moments.both * (own * shared).sum(0)).clamp(min=0)


def wanda_importance(rows_ND: Tensor, full: Expert, base: Expert, activation: Activation = functional.silu) -> Tensor:
    """Sum of the residual's magnitudes times the root mean square of what they meet (the paper's ablation)."""
    residual = full - base
    inputs = _mean(rows_ND, lambda rows: rows.square().sum(0)).sqrt()
    units = _mean(rows_ND, lambda rows: hidden(rows, full, activation).square().sum(0)).sqrt()
    rows = residual.gate_HD.abs() @ inputs + residual.up_HD.abs() @ inputs
    return rows + residual.down_DH.abs().sum(0) * units


def _moments(rows_ND: Tensor, full: Expert, base: Expert, activation: Activation) -> Hidden:
    sums = torch.zeros(3, full.gate_HD.shape[0])
    for rows in rows_ND.float().split(CHUNK):
        own, shared = hidden(rows, full, activation), hidden(rows, base, activation)
        sums += torch.stack([own.square().sum(0), shared.square().sum(0), (own * shared).sum(0)])
    return Hidden(*(sums / len(rows_ND)))


def _mean(rows_ND: Tensor, total: Callable[[Tensor], Tensor]) -> Tensor:
    parts = [total(rows) for rows in rows_ND.float().split(CHUNK)]
    return torch.stack(parts).sum(0) / len(rows_ND)


IMPORTANCES = {"output": output_importance, "wanda": wanda_importance}
