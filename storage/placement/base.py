"""The placement contract. A placement reads no clock, does no I/O and keeps nothing but the state it is given."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from forebay.storage.plan import Span


@dataclass(slots=True)
class PlacementState:
    """What a placement remembers from one chunk to the next."""

    work: list[float]
    """Seconds of reading given to each device so far, less those of the least loaded one. Starts at the latencies."""


class Placement(ABC):
    """Chooses a device for every stripe of a chunk."""

    name: ClassVar[str]

    @abstractmethod
    def eligible(self, key: bytes, weights: Sequence[float]) -> list[int]:
        """The devices that may get stripes of the chunk `key` when they have room."""

    @abstractmethod
    def assign(
        self,
        key: bytes,
        spans: Sequence[Span],
        weights: Sequence[float],
        free: Sequence[int],
        state: PlacementState,
    ) -> list[int] | None:
        """The device of every stripe, or None when they do not fit.

        Args:
            key: of the chunk.
            spans: its stripes, in order. Striping stays within the call, so a layer group is one call.
            weights: read bandwidth of each device (bytes/s); 0 for one that must not be used.
            free: free slots of each device; never exceeded.
            state: updated on success, untouched otherwise.
        """


def usable(weights: Sequence[float]) -> list[int]:
    """The devices with a weight."""
    return [device for device, weight in enumerate(weights) if weight > 0]
