"""What the pool has to reach, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forebay.bench.rounds import Series


@dataclass(frozen=True, slots=True)
class Bar:
    """A ratio and the least (or most) that it must be."""

    name: str
    meaning: str
    limit: float
    at_least: bool = True

    def passed(self, value: float) -> bool:
        """Whether `value` clears the bar."""
        return value >= self.limit if self.at_least else value <= self.limit

    @property
    def text(self) -> str:
        """`≥ 0.95`."""
        return f"{'≥' if self.at_least else '≤'} {self.limit:g}"


BARS = (
    Bar("stripe_vs_sum", "read bandwidth of three unequal devices striped / sum of each alone (fio)", 0.95),
    Bar("stripe_vs_equal", "time to load with equal placement / with bandwidth placement", 2.0),
    Bar("stripe_vs_hash", "time to load with hash placement / with bandwidth placement", 2.0),
    Bar("any_prefix_balance", "worst prefix: time / ideal time (bytes / sum of devices alone)", 1.15, at_least=False),
    Bar("single_device_vs_fio", "read bandwidth of one file device / fio io_uring O_DIRECT", 0.95),
    Bar("cpu_per_gb_vs_fs_tier", "CPU seconds per GB read / vLLM's file system tier", 0.35, at_least=False),
    Bar("blocked_vs_fs_tier", "seconds blocked in I/O per GB / vLLM's file system tier", 0.10, at_least=False),
    Bar("ttft_warm_vs_recompute", "time to first token recomputed / warm from the file device", 15.0),
    Bar("ttft_warm_vs_device_hit", "time to first token warm / held by the engine itself", 1.3, at_least=False),
    Bar("checksum_overhead", "load time with / without verification", 1.10, at_least=False),
)


@dataclass(slots=True)
class Measurement:
    """What one part of the benchmark found."""

    ratios: dict[str, float] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    """Everything behind the ratios: numbers with units, both arms, all rounds."""


@dataclass(frozen=True, slots=True)
class Context:
    """How a part is to measure."""

    work: Path
    """A folder of its own on the disk to use."""
    quick: bool
    rounds: int
    wanted: frozenset[str]
    """Names of ratios."""
    say: Callable[[str], None]
    """Tells the user what is going on."""


def medians(series: Mapping[str, Series]) -> dict[str, Any]:
    """JSON of several series."""
    return {name: values.to_json() for name, values in series.items()}
