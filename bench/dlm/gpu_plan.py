"""What is measured of a diffusion model on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from forebay.bench.dlm.arms import ARMS, Arm
from forebay.bench.dlm.gpu_check import ALONE, VARLEN
from forebay.bench.dlm.gpu_floor import weight_bytes
from forebay.bench.dlm.shape import llada_shape
from forebay.bench.dlm.speed import SETTINGS, USER
from forebay.diffusion.config import DiffusionConfig
from forebay.diffusion.decoding import DecodingSettings

ROOM = 1.5
"""Memory that must be free, relative to the weights: for keys, values and states (our choice)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to measure."""

    device: torch.device
    dtype: torch.dtype
    config: DiffusionConfig
    prefixes: tuple[int, ...]
    user: int
    settings: DecodingSettings
    arms: tuple[Arm, ...] = ARMS
    rounds: int
    requests: int = 8
    """That share a prefix."""
    shared: int
    """Tokens of it; one of `prefixes`, as is that of the profile."""
    engines: Mapping[torch.dtype, tuple[str, ...]]
    """Ways to compute attention that are checked, for each type."""
    copied: int
    """Bytes of the copy that the card's bandwidth is measured with."""
    product: int
    """Rows and columns of the matrices that its rate is measured with."""

    @property
    def item(self) -> int:
        """Bytes of a number."""
        return self.dtype.itemsize

    @property
    def bytes(self) -> int:
        """Memory to have free."""
        return int(ROOM * weight_bytes(self.config, self.item))


def plan(device: torch.device, quick: bool) -> Plan:
    """LLaDA-8B in bfloat16; with `quick` one round of two prefixes."""
    alone, both = (ALONE,), (ALONE, VARLEN)
    return Plan(
        device=device,
        dtype=torch.bfloat16,
        config=llada_shape(hidden=4096, intermediate=12288, heads=32, vocabulary=126_464),
        prefixes=(500, 1450) if quick else (500, 1450, 4000),
        user=USER,
        settings=SETTINGS,
        rounds=1 if quick else 3,
        shared=1450,
        engines={torch.float32: alone, torch.bfloat16: both, torch.float16: both},
        copied=1 << 30,
        product=8192,
    )


def tiny(device: torch.device) -> Plan:
    """The same steps with next to nothing to do, for a machine without a GPU."""
    return Plan(
        device=device,
        dtype=torch.float32,
        config=llada_shape(hidden=32, intermediate=32, heads=2, vocabulary=50),
        prefixes=(12, 40),
        user=4,
        settings=DecodingSettings(length=24, steps=6, block=12, refresh=3),
        rounds=2,
        requests=3,
        shared=40,
        engines={torch.float32: (ALONE,), torch.bfloat16: (ALONE,)},
        copied=1 << 16,
        product=32,
    )
