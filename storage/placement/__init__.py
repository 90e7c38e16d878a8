"""Where the stripes of a chunk go: pure functions of (key, spans, bandwidths, free slots, running state)."""

from __future__ import annotations

from forebay.storage.placement.bandwidth import Bandwidth, Equal
from forebay.storage.placement.base import Placement, PlacementState
from forebay.storage.placement.ideal import ideal_shares, ideal_time
from forebay.storage.placement.whole import Hash, Single, Tiered

PLACEMENTS: dict[str, type[Placement]] = {kind.name: kind for kind in (Bandwidth, Equal, Hash, Tiered, Single)}


def make_placement(name: str) -> Placement:
    """The placement called `name` (a key of `PLACEMENTS`)."""
    return PLACEMENTS[name]()


__all__ = [
    "PLACEMENTS",
    "Bandwidth",
    "Equal",
    "Hash",
    "Placement",
    "PlacementState",
    "Single",
    "Tiered",
    "ideal_shares",
    "ideal_time",
    "make_placement",
]
