"""The card: what it is, and what it can do at best, measured: copying in its memory and one large matrix product."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from typing import Any

import torch

from forebay.bench.moe.gpu_clock import Clock

PACKAGES = ("torch", "triton", "vllm")
REPEATS = 5


@dataclass(frozen=True, slots=True)
class Need:
    """What a call cannot do without."""

    bytes: float
    operations: float
    """Floating-point: a multiplication and an addition are two."""


@dataclass(frozen=True, slots=True)
class Roof:
    """The rates of a card."""

    bytes_per_second: float
    """Read and written, of a large copy."""
    operations_per_second: float
    """Of a large matrix product."""

    def floor(self, need: Need) -> float:
        """Seconds: the longer of moving the bytes and doing the operations."""
        return max(need.bytes / self.bytes_per_second, need.operations / self.operations_per_second)


def describe(device: torch.device) -> dict[str, Any]:
    """The card and the versions of what runs on it."""
    found: dict[str, Any] = {"name": "CPU"}
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        found = {
            "name": card.name,
            "compute_capability": f"{card.major}.{card.minor}",
            "memory_bytes": card.total_memory,
            "l2_bytes": getattr(card, "L2_cache_size", None),
            "multiprocessors": card.multi_processor_count,
            "cuda": torch.version.cuda,
        }
    return found | {"versions": {name: _version(name) for name in PACKAGES}}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def measure_roof(device: torch.device, dtype: torch.dtype, clock: Clock, copied: int, size: int) -> Roof:
    """The rates, of copying `copied` bytes and of multiplying matrices of `size` x `size`."""
    source = torch.zeros(copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(a)
    ready = [lambda: None] * REPEATS
    times = []
    for launch in (lambda: target.copy_(source), lambda: torch.mm(a, b, out=product)):
        clock.seconds(launch, ready)  # the first ones load kernels and raise the clock of the card
        times.append(clock.seconds(launch, ready))
    return Roof(2 * copied / times[0], 2 * size**3 / times[1])
