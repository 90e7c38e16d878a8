"""Aligning experts with their barycenter, against POT's `free_support_barycenter`: `barycenter_vs_pot`.

The experts are of a layer with 16 experts of 704 units and 1,024 dimensions. Their units lie near a subspace of few
dimensions, so that several rounds are needed, as with real experts. Both run until nothing moves, and must agree.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from forebay.bench.rounds import Series
from forebay.bench.suite import Context, Measurement
from forebay.compression.backbone import barycenter
from forebay.compression.experts import Expert
from forebay.storage.errors import ForebayError

EXPERTS, UNITS, SIZE = 16, 704, 1024
QUICK_SIZES = (12, 576, 768)
RANK, SPREAD, NOISE = 8, 0.35, 0.05
AGREEMENT = 1e-4


def measure(context: Context) -> Measurement:
    """POT's time, of one run as it takes long, over our median.

    Raises:
        ForebayError: POT is missing, or the results differ.
    """
    try:
        from ot.lp import free_support_barycenter
    except ImportError:
        raise ForebayError("POT is missing; install it with `pip install POT`") from None
    sizes = QUICK_SIZES if context.quick else (EXPERTS, UNITS, SIZE)
    experts = make_experts(*sizes)
    clouds = [expert.cloud().double().numpy() for expert in experts]
    weights = [np.full(sizes[1], 1 / sizes[1])] * sizes[0]
    ours: list[float] = []
    for number in range(context.rounds):
        context.say(f"ours, round {number + 1}")
        started = time.perf_counter()
        found = barycenter(experts)
        ours.append(time.perf_counter() - started)
    context.say("POT")
    started = time.perf_counter()
    points = free_support_barycenter(clouds, weights, clouds[0].copy(), weights[0], numItermax=100, stopThr=1e-9)
    theirs = time.perf_counter() - started
    worst = float(np.abs(points - found.weights.cloud().numpy()).max())
    if worst > AGREEMENT:
        raise ForebayError(f"the barycenters differ by {worst:g}: the times mean nothing")
    mine = Series.of(ours, "s")
    details = {
        "experts, units, dimensions": sizes,
        "rounds_that_moved": found.rounds,
        "seconds": {"forebay": mine.to_json(), "POT": theirs},
    }
    return Measurement({"barycenter_vs_pot": theirs / mine.median}, details)


def make_experts(experts: int, units: int, size: int) -> list[Expert]:
    """Experts with a common part, in float32, each with its units in another order."""
    random = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    common, directions = normal(units, RANK), normal(RANK, 3 * size) / RANK**0.5
    made = []
    for _ in range(experts):
        points = (common + SPREAD * normal(units, RANK)) @ directions + NOISE * normal(units, 3 * size)
        made.append(Expert.from_cloud(points[torch.randperm(units, generator=random)]))
    return made
