"""One backbone for all experts of a layer, and how each expert's units line up with it.

Units of an expert can be reordered without changing its function, so experts are aligned before they are averaged.
The barycenter is the free-support 2-Wasserstein barycenter with uniform weights and as many points as units (PARSER,
arXiv 2609.00575, after ResMoE): with equal sizes each transport plan is a permutation, so one round is one linear
assignment for each expert and the mean of the reordered experts.

Shape letters as in `experts.py`, and M points that move.
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
FLOAT = 4
"""Bytes."""


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

    Works in float32 with one expert at a time, and casts at the end. Stops when no assignment changes, when the points
    hardly move, or after `max_rounds`.

    Args:
        experts: all of one shape.
        max_rounds: limit of rounds.
        progress: told after every expert.
    """
    points, costs, rounds, distance = experts[0].to(torch.float32, copy=True), _Costs(experts), 0, math.inf
    moved_M = torch.arange(points.gate_HD.shape[0])
    before = torch.full((len(experts), len(moved_M)), -1)
    while True:
        transport = before.clone()
        for number in range(len(experts)):
            transport[number] = _assign(costs.update(number, points, moved_M))
            if progress:
                progress(rounds + 1, number + 1)
        moved_M = (transport != before).any(dim=0).nonzero()[:, 0]
        if not len(moved_M) or rounds == max_rounds or distance <= TOLERANCE:
            break
        distance = _move(points, experts, transport, moved_M)
        before, rounds = transport, rounds + 1
    return Backbone(points.to(experts[0].gate_HD.dtype), transport, rounds)


class _Costs:
    """For each expert, the cost of every unit at every point: their squared distance.

    The squares of the points add the same to every assignment and are left out. Those of the units do so too, but with
    them most points have a unit of their own at once, and the assignment is found faster.

    After the first rounds few points move. Their costs alone are computed again, where the costs of all experts
    together need at most half the memory of their weights (our choice); else all are.
    """

    def __init__(self, experts: Sequence[Expert]) -> None:
        units, size = experts[0].gate_HD.shape
        self.experts = experts
        self.squares_EH = torch.stack([_squares(expert) for expert in experts])
        self.kept: list[Tensor] | None = None
        if 2 * units * FLOAT <= 3 * size * experts[0].gate_HD.element_size():
            self.kept = [torch.empty(units, units) for _ in experts]

    def update(self, number: int, points: Expert, moved_M: Tensor) -> Tensor:
        """The costs (points, units) of one expert, after some points moved."""
        expert, squares_H = self.experts[number], self.squares_EH[number]
        if self.kept is None:
            return _distances(expert, squares_H, points)
        if len(moved_M) == len(squares_H):
            self.kept[number] = _distances(expert, squares_H, points)
        else:
            self.kept[number][moved_M] = _distances(expert, squares_H, points.permuted(moved_M))
        return self.kept[number]


def _squares(expert: Expert) -> Tensor:
    gate, up, down = expert.gate_HD.float(), expert.up_HD.float(), expert.down_DH.float()
    return gate.square().sum(1) + up.square().sum(1) + down.square().sum(0)


def _distances(expert: Expert, squares_H: Tensor, points: Expert) -> Tensor:
    """Squared distances of some points (M, H), less the squares of the points."""
    cost_MH = torch.addmm(squares_H, points.gate_HD, expert.gate_HD.float().T, alpha=-2)
    cost_MH.addmm_(points.up_HD, expert.up_HD.float().T, alpha=-2)
    return cost_MH.addmm_(points.down_DH.T, expert.down_DH.float(), alpha=-2)


def _assign(cost_HH: Tensor) -> Tensor:
    """The unit for each point, at the least total cost."""
    from scipy.optimize import linear_sum_assignment  # serving must not need scipy

    _, units = linear_sum_assignment(cost_HH.numpy())
    return torch.from_numpy(units)


def _move(points: Expert, experts: Sequence[Expert], transport_EH: Tensor, moved_M: Tensor) -> float:
    """Move some points to the means of their units; the sum of the squared movements."""
    units = points.permuted(moved_M)
    total = Expert(*(torch.zeros_like(part) for part in (units.gate_HD, units.up_HD, units.down_DH)))
    for expert, order_H in zip(experts, transport_EH, strict=True):
        total.add_(expert.permuted(order_H[moved_M]))
    total.divide_(len(experts))
    points.gate_HD[moved_M], points.up_HD[moved_M] = total.gate_HD, total.up_HD
    points.down_DH[:, moved_M] = total.down_DH
    return float(_squares(total - units).sum(dtype=torch.float64))
