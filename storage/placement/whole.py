"""Placements that keep a chunk on one device: what others do today, here to compare with."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import ClassVar

from forebay.storage.placement.base import Placement, PlacementState, usable
from forebay.storage.plan import Span


class Hash(Placement):
    """The whole chunk on the device that its key hashes to."""

    name: ClassVar[str] = "hash"

    def eligible(self, key: bytes, weights: Sequence[float]) -> list[int]:
        """The one the key hashes to."""
        devices = usable(weights)
        return [devices[zlib.crc32(key) % len(devices)]] if devices else []

    def assign(
        self,
        key: bytes,
        spans: Sequence[Span],
        weights: Sequence[float],
        free: Sequence[int],
        state: PlacementState,
    ) -> list[int] | None:
        """All stripes on that device."""
        return _first_with_room(self.eligible(key, weights), len(spans), free)


class Single(Placement):
    """Everything on the first usable device."""

    name: ClassVar[str] = "single"

    def eligible(self, key: bytes, weights: Sequence[float]) -> list[int]:
        """The first usable one."""
        return usable(weights)[:1]

    def assign(
        self,
        key: bytes,
        spans: Sequence[Span],
        weights: Sequence[float],
        free: Sequence[int],
        state: PlacementState,
    ) -> list[int] | None:
        """All stripes on that device."""
        return _first_with_room(self.eligible(key, weights), len(spans), free)


class Tiered(Placement):
    """Whole chunks on the first device of the list until it is full, then the next."""

    name: ClassVar[str] = "tiered"

    def eligible(self, key: bytes, weights: Sequence[float]) -> list[int]:
        """Every usable device."""
        return usable(weights)

    def assign(
        self,
        key: bytes,
        spans: Sequence[Span],
        weights: Sequence[float],
        free: Sequence[int],
        state: PlacementState,
    ) -> list[int] | None:
        """All stripes on the first device with room for them, else the rests of several."""
        devices = usable(weights)
        whole = _first_with_room(devices, len(spans), free)
        return whole if whole is not None else _fill_in_order(devices, len(spans), free)


def _first_with_room(devices: Sequence[int], count: int, free: Sequence[int]) -> list[int] | None:
    for device in devices:
        if free[device] >= count:
            return [device] * count
    return None


def _fill_in_order(devices: Sequence[int], count: int, free: Sequence[int]) -> list[int] | None:
    """No device has room for all: the rests of several, so that no space is lost."""
    slots = [device for device in devices for _ in range(min(free[device], count))]
    return slots[:count] if len(slots) >= count else None
