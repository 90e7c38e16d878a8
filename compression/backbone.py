"""One backbone for all experts of a layer, and how each expert's units line up with it.

Units of an expert can be reordered without changing its function, so experts are aligned before they are averaged.
The barycenter is the free-support 2-Wasserstein barycenter with uniform weights and as many points as units (PARSER,
arXiv 2609.00575, after ResMoE): with equal sizes each transport plan is a permutation, so one round is one linear
assignment for each expert and the mean of the reordered experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from forebay.compression.experts import Expert

MAX_ROUNDS = 100
TOLERANCE = 1e-9
"""Squared movement of all points in one round that ends the iteration (both as published)."""


@dataclass(frozen=True, slots=True)
class Backbone:
    """What a layer's experts share."""

    weights: Expert
    """In the experts' own type."""
    transport_EH: Tensor
    """`transport_EH[e, j]`: which unit of expert e lines up with unit j of the backbone. int64."""
    rounds: int = 0
    """In which points moved."""


Progress = Callable[[int, int], None]
"""Told the round and how many experts of it are aligned."""


def mean_backbone(experts: Sequence[Expert]) -> Backbone:
    """The plain average, units as they are (the paper's ablation). Averages in the weights' own type, as published."""
    weights = Expert(
        torch.stack([expert.gate_HD for expert in experts]).mean(dim=0),
        torch.stack([expert.up_HD for expert in experts]).mean(dim=0),
        torch.stack([expert.down_DH for expert in experts]).mean(dim=0),
    )
    units = weights.gate_HD.shape[0]
    return Backbone(weights, torch.arange(units).expand(len(experts), units).clone())


def barycenter(
    experts: Sequence[Expert], *, max_rounds: int = MAX_ROUNDS, workers: int = 1, progress: Progress | None = None
) -> Backbone:
    """Align all experts with their barycenter, starting from the first expert.

    Works in float32 with one expert's points at a time, and casts at the end. Stops when no assignment changes, when
    the points hardly move, or after `max_rounds`.

    Args:
        experts: all of one shape.
        max_rounds: limit of rounds.
        workers: experts that are aligned at a time.
        progress: told after every expert.
    """
    points, rounds = experts[0].cloud(), 0
    with ThreadPoolExecutor(workers) as pool:
        transport = _align_all(pool, experts, points, 1, progress)
        for rounds in range(1, max_rounds + 1):
            moved = _average(experts, transport)
            distance = float((moved - points).square().sum(dtype=torch.float64))
            points, before = moved, transport
            transport = _align_all(pool, experts, points, rounds + 1, progress)
            if distance <= TOLERANCE or torch.equal(transport, before):
                break
    return Backbone(Expert.from_cloud(points).to(experts[0].gate_HD.dtype), transport, rounds)


def _align_all(
    pool: ThreadPoolExecutor, experts: Sequence[Expert], points: Tensor, rounds: int, progress: Progress | None
) -> Tensor:
    rows = []
    for done, row in enumerate(pool.map(lambda expert: _align(expert, points), experts), 1):
        rows.append(row)
        if progress:
            progress(rounds, done)
    return torch.stack(rows)


def _align(expert: Expert, points_H3D: Tensor) -> Tensor:
    """The unit of the expert for each point, at the least total squared distance.

    The squares of the points and of the units add the same to every assignment, so the products alone decide.
    """
    products = points_H3D @ expert.cloud().T
    _, units = linear_sum_assignment(products.numpy(), maximize=True)
    return torch.from_numpy(units)


def _average(experts: Sequence[Expert], transport_EH: Tensor) -> Tensor:
    total = torch.zeros_like(experts[0].cloud())
    for expert, order in zip(experts, transport_EH, strict=True):
        total += expert.cloud()[order]
    return total / len(experts)
