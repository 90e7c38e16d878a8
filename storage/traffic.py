"""Keeping devices busy and timing them: what calibration measures with."""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle

from forebay.storage.config import BLOCK
from forebay.storage.device.base import Device, Direction, Op
from forebay.storage.errors import DeviceError
from forebay.storage.huge_pages import collapse

LATENCY_READS = 100
LATENCY_SECONDS = 0.2
"""The latency is the median of so many small reads, or of as many as fit into this time."""
RAMP_SECONDS = 0.15
"""What arrives within this time of the first answer does not count: the ramp of a queue, the burst of a throttle
(our choice: one and a half slices of the kernel's)."""
STALL_SECONDS = 10.0
"""A device that answers nothing for so long is given up."""


@dataclass(slots=True)
class Bench:
    """One device, its scratch slots, and memory for what is in flight."""

    device: Device
    slots: list[int]
    stripe: int
    depth: int
    memory: mmap.mmap = field(init=False)
    base: int = field(init=False)

    def __post_init__(self) -> None:
        if not self.slots:
            raise DeviceError(
                self.device.name, "not one slot is free to measure with", "run `forebay pool clear`, or enlarge it"
            )
        self.depth = min(self.depth, len(self.slots))
        self.memory = mmap.mmap(-1, self.depth * self.stripe, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory[:] = os.urandom(self.stripe) * self.depth
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        collapse(self.base, len(self.memory))
        self.device.register(self.base, len(self.memory))

    def op(self, place: int, direction: Direction, slot: int, length: int) -> Op:
        """An operation on a slot, with the memory of one of `depth` places."""
        memory = [(self.base + place * self.stripe, length)]
        return Op(place + 1, direction, slot * self.stripe, length, memory, False)


def prepare(bench: Bench, seconds: float) -> None:
    """Write slots for the first time, which costs page faults and extent conversions, and keep to those written."""
    (load,) = _run([bench], Direction.WRITE, seconds)
    bench.slots = bench.slots[: load.operations]


def bandwidths(benches: Sequence[Bench], direction: Direction, seconds: float) -> list[float]:
    """Bytes per second of each device while all of them are busy."""
    return [load.bandwidth for load in _run(benches, direction, seconds)]


def _run(benches: Sequence[Bench], direction: Direction, seconds: float) -> list[_Load]:
    """Keep every device busy for `seconds`, then wait for what is in flight."""
    loads = [_Load(bench, direction, min(RAMP_SECONDS, seconds / 4)) for bench in benches]
    started = time.monotonic()
    for load in loads:
        load.submit(range(load.bench.depth))
    poller = select.poll()
    for load in loads:
        poller.register(load.bench.device.fileno(), select.POLLIN)
    while any(load.outstanding for load in loads):
        poller.poll(100)
        now = time.monotonic()
        for load in loads:
            load.collect(now, more=now - started < seconds)
    return loads


@dataclass(slots=True)
class _Load:
    """The traffic of one device in one run.

    Bandwidth is counted from one answer to another: from the last one of the ramp to the last one that came while the
    queue was still kept full. So it depends neither on how a run begins nor on how it ends.
    """

    bench: Bench
    direction: Direction
    ramp: float
    started: float = field(default_factory=time.monotonic)
    outstanding: int = 0
    operations: int = 0
    first: float = 0.0
    """When the first answer came."""
    last: float = field(default_factory=time.monotonic)
    """When the latest answer came."""
    window_start: float = 0.0
    window_end: float = 0.0
    window_bytes: int = 0
    next_slot: Iterator[int] = field(init=False)

    def __post_init__(self) -> None:
        self.next_slot = cycle(self.bench.slots)

    @property
    def bandwidth(self) -> float:
        """Bytes per second; over the whole run when it was too short for a window."""
        if self.window_bytes and self.window_end > self.window_start:
            return self.window_bytes / (self.window_end - self.window_start)
        return self.operations * self.bench.stripe / max(self.last - self.started, 1e-9)

    def submit(self, places: Sequence[int]) -> None:
        bench = self.bench
        for place in places:  # one by one: a device tells the end of a batch only, and the queue is to stay full
            bench.device.submit([bench.op(place, self.direction, next(self.next_slot), bench.stripe)])
        self.outstanding += len(places)

    def collect(self, now: float, *, more: bool) -> None:
        done = self.bench.device.poll()
        for completion in done:
            if completion.result < 0:
                raise DeviceError(self.bench.device.name, os.strerror(-completion.result), "check the device")
        self.outstanding -= len(done)
        if done:
            self._count(len(done), now, more)
            if more:
                self.submit([completion.tag - 1 for completion in done])
        elif self.outstanding and now - self.last > STALL_SECONDS:
            raise DeviceError(self.bench.device.name, f"no answer within {STALL_SECONDS:g} s", "check the device")

    def _count(self, count: int, now: float, full: bool) -> None:
        self.operations += count
        self.first = self.first or now
        self.last = now
        if now - self.first < self.ramp:
            self.window_start = now
        elif full:
            self.window_bytes += count * self.bench.stripe
            self.window_end = now


def latency(bench: Bench) -> float:
    """Median time of a 4 KiB read with nothing else in flight (seconds)."""
    times: deque[float] = deque()
    end = time.monotonic() + LATENCY_SECONDS
    poller = select.poll()
    poller.register(bench.device.fileno(), select.POLLIN)
    slots = cycle(bench.slots)
    while len(times) < LATENCY_READS and (time.monotonic() < end or not times):
        bench.device.submit([bench.op(0, Direction.READ, next(slots), BLOCK)])
        while not (done := bench.device.poll()):
            if not poller.poll(STALL_SECONDS * 1000):
                raise DeviceError(bench.device.name, f"no answer within {STALL_SECONDS:g} s", "check the device")
        if done[0].result < 0:
            raise DeviceError(bench.device.name, os.strerror(-done[0].result), "check the device")
        times.append(done[0].seconds)
    return statistics.median(times)
