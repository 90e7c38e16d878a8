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
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from forebay.compression.assignment import FLOAT, Assignments, solvers
from forebay.compression.experts import Expert
from forebay.compression.int8 import Int8Backbone, quantize

MAX_ROUNDS = 100
TOLERANCE = 1e-9
"""Squared movement of all points in one round that ends the iteration (both as published)."""


@dataclass(frozen=True, slots=True)
class Backbone:
    """What a layer's experts share."""

    weights: Expert
    """In the experts' own type; float32 where it is stored in int8."""
    transport_EH: Tensor
    """`transport_EH[e, j]`: which unit of expert e lines up with unit j of the backbone. int64."""
    rounds: int = 0
    """In which points moved."""
    int8: Int8Backbone | None = None
    """What is stored, if that is int8: `weights` are what it stands for."""

    def in_int8(self) -> Backbone:
        """The same, rounded."""
        stored = quantize(self.weights)
        return replace(self, weights=stored.dequantized(), int8=stored)


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
    points, rounds, distance = experts[0].to(torch.float32, copy=True), 0, math.inf
    units = points.gate_HD.shape[0]
    moved_M, before = torch.arange(units), torch.full((len(experts), units), -1)
    with _Costs(experts) as costs:
        while True:
            transport = costs.assign(points, moved_M, partial(progress or _silent, rounds + 1))
            moved_M = (transport != before).any(dim=0).nonzero()[:, 0]
            if not len(moved_M) or rounds == max_rounds or distance <= TOLERANCE:
                break
            distance = _move(points, experts, transport, moved_M)
            before, rounds = transport, rounds + 1
    return Backbone(points.to(experts[0].gate_HD.dtype), transport, rounds)


def _silent(round_: int, done: int) -> None:
    pass


class _Costs:
    """For each expert, the cost of every unit at every point: their squared distance.

    The squares of the points add the same to every assignment and are left out. Those of the units do so too, but with
    them most points have a unit of their own at once, and the assignment is found faster.

    After the first rounds few points move. Their costs alone are computed again, where the costs of all experts
    together need at most half the memory of their weights (our choice); else all are, for one expert at a time.
    """

    def __init__(self, experts: Sequence[Expert]) -> None:
        self._experts = experts
        units, size = experts[0].gate_HD.shape
        self._squares_EH = torch.stack([_squares(expert) for expert in experts])
        self._kept = 2 * units * FLOAT <= 3 * size * experts[0].gate_HD.element_size()
        matrices = len(experts) if self._kept else 1
        self._assignments = Assignments(matrices, units, solvers(len(experts), units) if self._kept else 0)

    def __enter__(self) -> Self:
        self._assignments.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._assignments.__exit__(*error)

    def assign(self, points: Expert, moved_M: Tensor, progress: Callable[[int], None]) -> Tensor:
        """The unit of each expert for each point (E, H), after some points moved.

        Args:
            points: all of them.
            moved_M: those that moved since the last call; all in the first.
            progress: told how many experts are done.
        """
        everything = not self._kept or len(moved_M) == points.gate_HD.shape[0]
        changed = points if everything else points.permuted(moved_M)
        found = []
        for number, expert in enumerate(self._experts):
            cost_HH = self._assignments.costs_EHH[number if self._kept else 0]
            cost_MH = _distances(expert, self._squares_EH[number], changed)
            if everything:
                cost_HH.copy_(cost_MH)
            else:
                cost_HH[moved_M] = cost_MH
            found.append(self._assignments.submit(number if self._kept else 0))
        transport = []
        for done, one in enumerate(found, 1):
            transport.append(torch.from_numpy(one.result().astype("int64")))
            progress(done)
        return torch.stack(transport)


def _squares(expert: Expert) -> Tensor:
    gate, up, down = expert.gate_HD.float(), expert.up_HD.float(), expert.down_DH.float()
    return gate.square().sum(1) + up.square().sum(1) + down.square().sum(0)


def _distances(expert: Expert, squares_H: Tensor, points: Expert) -> Tensor:
    """Squared distances of some points (M, H), less the squares of the points."""
    cost_MH = torch.addmm(squares_H, points.gate_HD, expert.gate_HD.float().T, alpha=-2)
    cost_MH.addmm_(points.up_HD, expert.up_HD.float().T, alpha=-2)
    return cost_MH.addmm_(points.down_DH.T, expert.down_DH.float(), alpha=-2)


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
