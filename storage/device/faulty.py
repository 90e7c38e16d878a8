"""A device that fails on command, for tests: put it around a real one and script what goes wrong."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import heapq
import itertools
import mmap
import os
import select
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from forebay.storage.device.base import Completion, Device, DeviceStats, Direction, Op

_BLOCK = 4096
_PIECE = 1 << 20
_OWN_TAGS = 1 << 63
"""Tags of the wrapper's own operations; callers' are smaller."""


@dataclass(slots=True)
class _Fault:
    """What happens to operations it matches: one of `code`, `delay`, `rate`, `hang` and `short`."""

    code: int = 0
    delay: float = 0.0
    rate: float = 0.0
    free: float = 0.0
    """When a device of that rate is done with what it was given."""
    hang: bool = False
    stuck: bool = False
    short: bool = False
    count: int | None = None
    every: int = 1
    writes_only: bool = False
    offsets: range | None = None
    seen: int = 0

    def strikes(self, op: Op) -> bool:
        if self.count == 0 or (self.writes_only and op.direction != Direction.WRITE):
            return False
        if self.offsets is not None and not (
            op.offset < self.offsets.stop and op.offset + op.length > self.offsets.start
        ):
            return False
        self.seen += 1
        if self.seen % self.every:
            return False
        if self.count is not None:
            self.count -= 1
        return True


@dataclass(order=True, slots=True)
class _Held:
    """An operation that waits for its time, or for `clear`."""

    due: float
    order: int
    op: Op = field(compare=False)
    stuck: bool = field(compare=False)
    since: float = field(compare=False, default_factory=time.monotonic)


class FaultyDevice(Device):
    """Passes everything on to `inner` until told otherwise. Any thread may call it.

    Faults add up: the first that strikes an operation decides. `clear` ends them all. Common arguments:
    `count` strikes at most so many operations, `every` only each k-th, `writes_only` leaves reads alone, and
    `offsets` strikes those that touch a range of the device (bytes).
    """

    def __init__(self, inner: Device) -> None:
        self.inner = inner
        self.name = inner.name
        self.kind = inner.kind
        self.capacity = inner.capacity
        self.alignment = inner.alignment
        self.persistent = inner.persistent
        self.largest = inner.largest
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._faults: list[_Fault] = []
        self._held: list[_Held] = []
        self._order = itertools.count()
        self._shortened: dict[int, int] = {}
        self._waited: dict[int, float] = {}
        """Seconds that operations with the inner device were held before."""
        self._ready: list[Completion] = []
        self._errors = 0
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll = select.epoll()
        self._epoll.register(inner.fileno(), select.EPOLLIN)
        self._epoll.register(self._event, select.EPOLLIN)
        self._clock: threading.Thread | None = None
        self._closed = False

    # ---- the script ----

    def fail(
        self, code: int, *, count: int | None = None, every: int = 1, writes_only: bool = False,
        offsets: range | None = None,
    ) -> None:  # fmt: skip
        """Operations complete with -`code` and touch no memory."""
        self._inject(_Fault(code=code, count=count, every=every, writes_only=writes_only, offsets=offsets))

    def short(self, *, count: int | None = None, every: int = 1, offsets: range | None = None) -> None:
        """Operations stop half-way, which a device reports as -EIO."""
        self._inject(_Fault(short=True, count=count, every=every, offsets=offsets))

    def delay(self, seconds: float, *, count: int | None = None, every: int = 1, writes_only: bool = False) -> None:
        """Operations start `seconds` late."""
        self._inject(_Fault(delay=seconds, count=count, every=every, writes_only=writes_only))

    def throttle(self, rate: float) -> None:
        """The device delivers `rate` bytes per second, one operation after the other."""
        self._inject(_Fault(rate=rate))

    def hang(self, *, stuck: bool = False, count: int | None = None, writes_only: bool = False) -> None:
        """Operations wait until `clear`. With `stuck` they cannot be cancelled, as direct I/O in flight cannot."""
        self._inject(_Fault(hang=True, stuck=stuck, count=count, writes_only=writes_only))

    def vanish(self) -> None:
        """As if the drive was pulled: everything fails with ENODEV, also what hangs."""
        with self._lock:
            for held in self._held:
                self._complete(held.op.tag, -errno.ENODEV, held.since)
            self._held.clear()
            self._faults.insert(0, _Fault(code=errno.ENODEV))

    def read_only(self) -> None:
        """Writes fail with EROFS."""
        self.fail(errno.EROFS, writes_only=True)

    def full(self) -> None:
        """Writes fail with ENOSPC."""
        self.fail(errno.ENOSPC, writes_only=True)

    def corrupt(self, offset: int = 0, length: int | None = None) -> None:
        """Flip a bit in every 4 KiB of a range (default: all), silently, as a worn medium does. Blocks.

        Where a MiB holds nothing but zeros it was never written, and stays as it is.
        """
        start = offset // _BLOCK * _BLOCK
        end = self.capacity if length is None else min(self.capacity, -(-(offset + length) // _BLOCK) * _BLOCK)
        with mmap.mmap(-1, _PIECE) as memory, self._lock:
            for at in range(start, end, _PIECE):
                size = min(_PIECE, end - at)
                self._now(Direction.READ, at, size, memory)
                if not any(memory[:size]):
                    continue
                memory[:size:_BLOCK] = bytes(byte ^ 1 for byte in memory[:size:_BLOCK])
                self._now(Direction.WRITE, at, size, memory)

    def clear(self) -> None:
        """End all faults; what hangs or waits is done now."""
        with self._lock:
            self._faults.clear()
            held, self._held = self._held, []
            if held and not self._closed:
                self._pass_on(sorted(held))

    # ---- the contract ----

    def submit(self, ops: Sequence[Op]) -> None:
        """Queue `ops`, less what the faults keep or fail."""
        with self._lock:
            passed = [op for op in ops if not self._struck(op)]
            if passed:
                self.inner.submit(passed)

    def poll(self) -> list[Completion]:
        """Completions of the inner device and of the faults."""
        with self._lock:
            self._collect()
            ready, self._ready = self._ready, []
            if ready and not self._closed:
                with contextlib.suppress(BlockingIOError):  # all of them came from the inner device
                    os.eventfd_read(self._event)
            return ready

    def fileno(self) -> int:
        """An epoll descriptor over the inner device's eventfd and the wrapper's own."""
        return -1 if self._closed else self._epoll.fileno()

    def cancel(self, tags: Iterable[int]) -> None:
        """Give up on operations; those that hang for good stay."""
        wanted = set(tags)
        with self._lock:
            for held in [held for held in self._held if held.op.tag in wanted and not held.stuck]:
                self._held.remove(held)
                self._complete(held.op.tag, -errno.ECANCELED, held.since)
            heapq.heapify(self._held)
            self.inner.cancel(wanted)

    def register(self, address: int, length: int) -> bool:
        """As the inner device."""
        return self.inner.register(address, length)

    def stats(self) -> DeviceStats:
        """The inner device's, with what the faults failed and hold."""
        with self._lock:
            inner = self.inner.stats()
            return inner._replace(errors=inner.errors + self._errors, in_flight=inner.in_flight + len(self._held))

    def flush(self) -> None:
        """As the inner device."""
        self.inner.flush()

    def close(self) -> None:
        """Drop what is held and close the inner device."""
        with self._lock:
            if self._closed:
                return
            for held in self._held:
                self._complete(held.op.tag, -errno.ECANCELED)
            self._held.clear()
            self._closed = True
            self._changed.notify()
        if self._clock is not None:
            self._clock.join()
        self._epoll.close()
        os.close(self._event)
        self.inner.close()

    # ---- inside; the lock is held ----

    def _inject(self, fault: _Fault) -> None:
        with self._lock:
            self._faults.append(fault)

    def _struck(self, op: Op) -> bool:
        fault = next((fault for fault in self._faults if fault.strikes(op)), None)
        if fault is None:
            return False
        if fault.hang or fault.delay or fault.rate:
            due = float("inf") if fault.hang else time.monotonic() + fault.delay
            if fault.rate:
                due = fault.free = max(fault.free, due) + op.length / fault.rate
            self._hold(_Held(due, next(self._order), op, fault.stuck))
        elif fault.short:
            self._shorten(op)
        else:
            self._complete(op.tag, -fault.code)
        return True

    def _hold(self, held: _Held) -> None:
        heapq.heappush(self._held, held)
        if self._clock is None:
            self._clock = threading.Thread(target=self._release_due, name="faulty", daemon=True)
            self._clock.start()
        self._changed.notify()

    def _release_due(self) -> None:
        with self._lock:
            while not self._closed:
                now = time.monotonic()
                while self._held and self._held[0].due <= now:
                    self._pass_on([heapq.heappop(self._held)])
                wait = self._held[0].due - now if self._held else float("inf")
                self._changed.wait(None if wait == float("inf") else wait)

    def _shorten(self, op: Op) -> None:
        half = op.length // 2
        if not half:
            self._complete(op.tag, -errno.EIO)
            return
        memory, left = [], half
        for address, length in op.memory:
            memory.append((address, min(length, left)))
            left -= memory[-1][1]
        self._shortened[op.tag] = op.length
        self.inner.submit([op._replace(length=half, memory=[piece for piece in memory if piece[1]])])

    def _pass_on(self, held: Sequence[_Held]) -> None:
        now = time.monotonic()
        self._waited.update((one.op.tag, now - one.since) for one in held)
        self.inner.submit([one.op for one in held])

    def _complete(self, tag: int, result: int, since: float | None = None) -> None:
        self._errors += result != -errno.ECANCELED
        self._ready.append(Completion(tag, result, 0, 0.0 if since is None else time.monotonic() - since))
        os.eventfd_write(self._event, 1)

    def _collect(self) -> list[Completion]:
        """Take over the inner device's completions; returns the wrapper's own."""
        own = []
        for completion in self.inner.poll():
            completion = completion._replace(seconds=completion.seconds + self._waited.pop(completion.tag, 0.0))
            if completion.tag >= _OWN_TAGS:
                own.append(completion)
            elif self._shortened.pop(completion.tag, None) is not None and completion.result >= 0:
                self._errors += 1
                self._ready.append(completion._replace(result=-errno.EIO, checksum=0))
            else:
                self._ready.append(completion)
        return own

    def _now(self, direction: Direction, offset: int, length: int, memory: mmap.mmap) -> None:
        """One operation past the faults, waited for."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.inner.submit([Op(_OWN_TAGS, direction, offset, length, [(address, length)], False)])
        while not (own := self._collect()):
            select.select([self.inner.fileno()], [], [], 1.0)
        if self._ready:
            os.eventfd_write(self._event, 1)  # their owner's poll has to be called for them
        if own[0].result != length:
            raise OSError(-own[0].result, os.strerror(-own[0].result))
