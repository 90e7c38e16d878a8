"""Watching one device: consecutive errors, quarantine, probation and observed bandwidth."""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import time

from forebay.storage.config import FaultPolicy
from forebay.storage.device.base import Completion, Device, Direction, Op
from forebay.storage.plan import DeviceHealth

logger = logging.getLogger(__name__)

PROBE_TAG = 0
"""Tag of the read that ends a quarantine; transfers count from 1."""

PROBE_BYTES = 4096
MINIMUM_OBSERVATION = 32 << 20
"""Bytes of saturated reads before a bandwidth is reported (our choice: several deep queues' worth)."""


class DeviceMonitor:
    """The health of one device as this process sees it.

    Reading and writing fail apart: a device that has gone read-only still serves its chunks. After
    `policy.errors` failures in a row in one direction the device is left alone for `policy.probation` seconds.
    Then reads come back once a probe read succeeds, writes on trial: the next failure sends them away again.
    """

    def __init__(self, device: Device, policy: FaultPolicy) -> None:
        self.device = device
        self.name = device.name
        self.reason = ""
        self.last_progress = time.monotonic()
        self._policy = policy
        self.suspect = False
        """Whether failures are being counted, so that successes matter."""
        self._errors = [0, 0]
        self._until: list[float | None] = [None, None]
        self._probing = False
        self._probe_memory = mmap.mmap(-1, PROBE_BYTES)
        self._seen = (0, 0)

    def accepts(self, direction: Direction) -> bool:
        """Whether operations in this direction are let through."""
        return self._until[direction] is None and self._until[Direction.READ] is None

    def record(self, completion: Completion, direction: Direction) -> None:
        """Learn from a completion. Cancelled operations say nothing: lateness is counted by `late`."""
        if completion.result >= 0:
            self._count(direction, 0)
        elif completion.result != -errno.ECANCELED:
            self._failed(direction, 1, os.strerror(-completion.result))

    def late(self, count: int) -> None:
        """`count` operations missed their deadline: the device is hung, in both directions."""
        self._failed(Direction.READ, count, f"no answer within {self._policy.deadline:g} s")

    def end_probe(self, completion: Completion) -> None:
        """Act on the completion of a probe; others are none of ours."""
        if completion.tag != PROBE_TAG:
            return
        self._probing = False
        if completion.result == PROBE_BYTES:
            logger.warning("device %r answers again and is used again", self.name)
            self._until[Direction.READ] = None
            self._count(Direction.READ, 0)
            self.reason = ""
        else:
            self._until[Direction.READ] = time.monotonic() + self._policy.probation

    def tend(self) -> None:
        """End quarantines that have lasted long enough."""
        now = time.monotonic()
        for direction in Direction:
            until = self._until[direction]
            if until is None or now < until:
                continue
            if direction is Direction.READ:
                self._probe()
            else:
                self._until[direction] = None
                self._count(direction, self._policy.errors - 1)

    def report(self) -> DeviceHealth:
        """State and the read bandwidth observed since the last report that had one."""
        return DeviceHealth(
            self.name,
            usable=self._until[Direction.READ] is None,
            writable=self._until[Direction.WRITE] is None,
            reason=self.reason,
            read_bandwidth=self._bandwidth(),
        )

    def _count(self, direction: Direction, errors: int) -> None:
        self._errors[direction] = errors
        self.suspect = any(self._errors)

    def _failed(self, direction: Direction, count: int, why: str) -> None:
        self._count(direction, self._errors[direction] + count)
        if self._errors[direction] < self._policy.errors or self._until[direction] is not None:
            return
        self.reason = f"{self.name}: {why}"
        self._until[direction] = time.monotonic() + self._policy.probation
        logger.warning(
            "device %r quarantined for %s after %d failures in a row (%s); tried again in %g s",
            self.name,
            "reading and writing" if direction is Direction.READ else "writing",
            self._errors[direction],
            why,
            self._policy.probation,
        )

    def _probe(self) -> None:
        if self._probing:
            return
        self._probing = True
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._probe_memory))
        self.device.submit([Op(PROBE_TAG, Direction.READ, 0, PROBE_BYTES, [(address, PROBE_BYTES)], False)])

    def _bandwidth(self) -> float:
        stats = self.device.stats()
        bytes_read = stats.read_saturated_bytes - self._seen[0]
        busy = stats.read_saturated_ns - self._seen[1]
        if bytes_read < MINIMUM_OBSERVATION or busy <= 0:
            return 0.0
        self._seen = (stats.read_saturated_bytes, stats.read_saturated_ns)
        return bytes_read / (busy * 1e-9)
