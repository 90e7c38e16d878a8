"""One backbone for all experts of a layer, and how each expert's units line up with it.

Units of an expert can be reordered without changing its function, so experts are aligned before they are averaged.
The barycenter is the free-support 2-Wasserstein barycenter with uniform weights and as many points as units (PARSER,
arXiv 2609.00575, after ResMoE): with equal sizes each transport plan is a permutation, so one round is one linear
assignment for each expert and the mean of the reordered experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
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
    experts: Sequence[Expert], *, max_rounds: int = MAX_ROUNDS, progress: Progress | None = None
) -> Backbone:
    """Align all experts with their barycenter, starting from the first expert.

    Works in float32 with one expert's points at a time, and casts at the end. Stops when no assignment changes, when
    the points hardly move, or after `max_rounds`.

    Args:
        experts: all of one shape.
        max_rounds: limit of rounds.
        progress: told after every expert.
    """
    points, before, rounds, distance = experts[0].cloud(), None, 0, math.inf
    while True:
        transport, moved = _round(experts, points, rounds + 1, progress)
        settled = before is not None and torch.equal(transport, before)
        if settled or rounds == max_rounds or distance <= TOLERANCE:
            break
        distance = float((moved - points).square().sum(dtype=torch.float64))
        points, before, rounds = moved, transport, rounds + 1
    return Backbone(Expert.from_cloud(points).to(experts[0].gate_HD.dtype), transport, rounds)


def _round(
    experts: Sequence[Expert], points_H3D: Tensor, number: int, progress: Progress | None
) -> tuple[Tensor, Tensor]:
    """Align every expert with the points: the transport, and the mean of the aligned experts."""
    transport, total = [], torch.zeros_like(points_H3D)
    for done, expert in enumerate(experts, 1):
        cloud = expert.cloud()
        units = _align(cloud, points_H3D)
        total += cloud[units]
        transport.append(units)
        if progress:
            progress(number, done)
    return torch.stack(transport), total / len(experts)


def _align(cloud_H3D: Tensor, points_H3D: Tensor) -> Tensor:
    """The unit of the expert for each point, at the least total squared distance.

    The squares of the points add the same to every assignment and are left out. Those of the units do so too, but with
    them most points have a unit of their own at once, and the assignment is found faster.
    """
    from scipy.optimize import linear_sum_assignment  # serving must not need scipy

    cost = torch.addmm(cloud_H3D.square().sum(1), points_H3D, cloud_H3D.T, alpha=-2)
    _, units = linear_sum_assignment(cost.numpy())
    return torch.from_numpy(units)
