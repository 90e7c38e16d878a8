"""How fast each device delivers now, and what it still owes: learned from loads as they end. No clock, no I/O.

The profile moves by a few percent with every observation, so that a hiccup does not upset placement. Whether a load
is worth it has to know at once.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from forebay.storage.worth import OVERHEAD


@dataclass(slots=True)
class _Load:
    """A load on its way."""

    wanted: list[int]
    done: list[int]
    """Bytes that each device had delivered when the load began, all loads together."""


class ReadRates:
    """Bandwidth and queue of every device, in the order of the pool's configuration.

    A load that ends says between which bounds the bandwidth lies: at least its own bytes over its time, at most all
    bytes that were out meanwhile over its time without `OVERHEAD`. An estimate within the bounds stays; otherwise the
    profile's is taken, moved between them. So short loads, which are mostly latency, upset nothing, long ones are
    believed at once, and what a device has unlearned by a slow spell it learns again from one read.

    Bytes and bandwidths are those of one lane.
    """

    def __init__(self, devices: int) -> None:
        self._bandwidths: list[float | None] = [None] * devices
        self._seen: list[float | None] = [None] * devices
        self._started = [0] * devices
        self._done = [0] * devices
        self._loads: dict[Hashable, _Load] = {}

    @property
    def queued(self) -> list[int]:
        """Bytes that each device has still to deliver."""
        return [started - done for started, done in zip(self._started, self._done, strict=True)]

    def bandwidths(self, profile: Sequence[float]) -> list[float]:
        """Bytes per second of each device: as observed, else what the profile says."""
        return [known if seen is None else seen for seen, known in zip(self._bandwidths, profile, strict=True)]

    def seen(self, device: int) -> float | None:
        """When the device last delivered something that says how fast it is; None for never."""
        return self._seen[device]

    def start(self, load: Hashable, wanted: Mapping[int, int]) -> None:
        """A load begins that reads so many bytes of each device."""
        self.drop(load)
        sizes = [wanted.get(device, 0) for device in range(len(self._done))]
        self._loads[load] = _Load(sizes, self._done.copy())
        self._started = [started + size for started, size in zip(self._started, sizes, strict=True)]

    def finish(
        self,
        load: Hashable,
        arrived: Mapping[int, int],
        seconds: Mapping[int, float],
        profile: Sequence[float],
        now: float,
    ) -> None:
        """A load has ended; unknown ones are ignored, so only the first rank to report counts.

        Args:
            load: as given to `start`.
            arrived: bytes that came, by device; fewer than wanted when the load failed or was given up.
            seconds: from its start to the device's last answer, by device.
            profile: bandwidths to go back to.
            now: for `seen`.
        """
        found = self._loads.get(load)
        if found is None:
            return
        for device, took in seconds.items():
            if found.wanted[device] and took > 0:
                self._observe(device, found, arrived.get(device, 0), took, profile[device])
                self._seen[device] = now
        self.drop(load)

    def drop(self, load: Hashable) -> None:
        """Forget a load that says nothing."""
        found = self._loads.pop(load, None)
        if found is not None:
            self._done = [done + size for done, size in zip(self._done, found.wanted, strict=True)]

    def clear(self) -> None:
        """Forget all loads on their way."""
        self._loads.clear()
        self._done = self._started.copy()

    def _observe(self, device: int, load: _Load, arrived: int, seconds: float, profile: float) -> None:
        wanted = load.wanted[device]
        others = self._started[device] - load.done[device] - wanted
        least = arrived / seconds
        # Of a load that brought nothing only this is sure: it would have ended, had the device been fast enough.
        most = ((arrived or wanted) + others) / (seconds - OVERHEAD) if seconds > OVERHEAD else math.inf
        known = self._bandwidths[device]
        if known is None or not least <= known <= most:
            self._bandwidths[device] = min(max(profile, least), most)
