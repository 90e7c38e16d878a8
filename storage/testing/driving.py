"""Memory with an address, and a loop that runs operations to completion."""

from __future__ import annotations

import ctypes
import mmap
import select
import time
from collections.abc import Iterable, Sequence

from forebay.storage.device.base import Completion, Device, Op


class Memory:
    """Page-aligned bytes that devices can read and write."""

    def __init__(self, size: int, fill: bytes = b"") -> None:
        self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.size = size
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._map[: len(fill)] = fill

    def __getitem__(self, part: slice) -> bytes:
        return self._map[part]

    def __setitem__(self, part: slice, data: bytes) -> None:
        self._map[part] = data

    def piece(self, offset: int, length: int) -> tuple[int, int]:
        """(address, length) of a part, as operations want it."""
        return self.address + offset, length


def collect(device: Device, count: int, timeout: float = 30.0) -> list[Completion]:
    """Wait on `fileno` and poll until `count` completions are there, in the order they came.

    Raises:
        TimeoutError: they did not come within `timeout` seconds.
    """
    found: list[Completion] = []
    end = time.monotonic() + timeout
    while len(found) < count:
        left = end - time.monotonic()
        if left <= 0 or not select.select([device.fileno()], [], [], left)[0]:
            raise TimeoutError(f"{len(found)} of {count} completions within {timeout} s; {device.stats()}")
        found += device.poll()
    return found


def run(device: Device, ops: Iterable[Op], timeout: float = 30.0) -> dict[int, Completion]:
    """Submit `ops` at once and wait for all; completions by tag."""
    batch: Sequence[Op] = list(ops)
    device.submit(batch)
    return {completion.tag: completion for completion in collect(device, len(batch), timeout)}
