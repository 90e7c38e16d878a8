"""Which hidden units of which expert keep weights of their own (PARSER, arXiv 2609.00575).

Rounding and ties follow the published implementation, so that the same scores keep the same units.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

MIN_UNITS = 4
"""Units that every expert keeps, whatever they score (the paper's setting)."""


def target(rho: float, units: int) -> int:
    """Units to keep of `units` when a share `rho` is to go: half to even, of the float product."""
    return round((1.0 - min(max(rho, 0.0), 1.0)) * units)


def select_layer(scores: Sequence[Tensor], rho: float, min_units: int = MIN_UNITS) -> list[Tensor]:
    """Keep the best units of a whole layer, and at least `min_units` of every expert (`parser-l-sp`).

    Args:
        scores: of each expert, (H,), float32. Compared across experts as they are.
        rho: share of units that fall back to the backbone, clamped to [0, 1].
        min_units: floor for each expert; those count towards the target and may raise it.

    Returns:
        Ascending indices of the kept units of each expert.
    """
    wanted = max(target(rho, sum(len(expert) for expert in scores)), min_units * len(scores))
    return select_budget([scores], wanted, min_units)[0]


def select_expert(scores: Sequence[Tensor], rho: float, min_units: int = MIN_UNITS) -> list[Tensor]:
    """Keep the same share of every expert's units (`parser-e-sp`, the ablation); otherwise as `select_layer`."""
    return [
        torch.topk(expert, min(len(expert), max(min_units, target(rho, len(expert))))).indices.sort().values
        for expert in scores
    ]


def select_budget(layers: Sequence[Sequence[Tensor]], units: int, min_units: int = MIN_UNITS) -> list[list[Tensor]]:
    """Keep the best `units` of several layers together, and at least `min_units` of every expert.

    One layer is the paper's choice; pooling several under one budget is ours. Scores are compared as they are, so the
    caller brings those of several layers to one scale. Ties go to the earlier layer, expert and unit.

    Args:
        layers: scores by layer and expert.
        units: to keep in all.
        min_units: floor for each expert.
    """
    experts = [expert for layer in layers for expert in layer]
    floors = [torch.topk(expert, min(min_units, len(expert))).indices for expert in experts]
    kept = [torch.zeros(len(expert), dtype=torch.bool) for expert in experts]
    for mask, floor in zip(kept, floors, strict=True):
        mask[floor] = True
    left = units - sum(len(floor) for floor in floors)
    if left > 0:
        taken, pool = torch.cat(kept), torch.cat(list(experts))
        rest = (~taken).nonzero().squeeze(1)
        order = torch.sort(pool[rest], descending=True, stable=True).indices
        taken[rest[order[:left]]] = True
        kept = list(taken.split([len(expert) for expert in experts]))
    chosen = iter([mask.nonzero().squeeze(1) for mask in kept])
    return [[next(chosen) for _ in layer] for layer in layers]
