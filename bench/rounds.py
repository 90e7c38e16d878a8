"""Interleaved rounds and their medians: how every comparison here is made.

All arms of a comparison run once per round, in an order that turns by one place each round, so that a slow minute
of a shared machine meets all of them. What is compared are medians over the rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Series:
    """One number measured once per round."""

    values: tuple[float, ...]
    unit: str

    @classmethod
    def of(cls, values: Iterable[float], unit: str) -> Series:
        """A series from any iterable; not empty."""
        return cls(tuple(values), unit)

    @property
    def median(self) -> float:
        """The middle value."""
        return statistics.median(self.values)

    @property
    def spread(self) -> float:
        """(max - min) / median: how far the rounds lie apart."""
        return (max(self.values) - min(self.values)) / self.median if self.median else 0.0

    def to_json(self) -> dict[str, Any]:
        """Median, spread, unit and every round."""
        return {"median": self.median, "spread": self.spread, "unit": self.unit, "rounds": list(self.values)}


def interleave(
    arms: Mapping[str, Callable[[], T]], rounds: int, step: Callable[[str], None] = lambda arm: None
) -> dict[str, list[T]]:
    """Run every arm once per round.

    Args:
        arms: what to run, by name.
        rounds: how many times.
        step: called before each run with the arm's name (for a progress bar).

    Returns:
        The results of each arm, in the order of the rounds.
    """
    names = list(arms)
    results: dict[str, list[T]] = {name: [] for name in names}
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            step(name)
            results[name].append(arms[name]())
    return results
