"""The part that all devices on the native engine share: everything but how they are opened."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from forebay.storage.device._native import Queue
from forebay.storage.device.base import Completion, Device, DeviceStats, Op


class NativeDevice(Device):
    """A device behind a native `Queue`, whose threads move the bytes without the GIL."""

    def __init__(self, queue: Queue, *, name: str, kind: str, capacity: int, alignment: int, persistent: bool) -> None:
        self._queue = queue
        self.name = name
        self.kind = kind
        self.capacity = capacity
        self.alignment = alignment
        self.persistent = persistent

    def submit(self, ops: Sequence[Op]) -> None:
        """Queue `ops` in order.

        Raises:
            ValueError: an operation is empty, misaligned, beyond the device or unlike its memory, or the device is
                closed: mistakes of the caller. Nothing was queued then.
        """
        self._queue.submit(ops)

    def poll(self) -> list[Completion]:
        """All completions since the last call, also those left after `close`."""
        return list(map(Completion._make, self._queue.poll()))

    def fileno(self) -> int:
        """An eventfd, readable once a batch is over or an operation failed; -1 once closed."""
        return self._queue.fileno()

    def cancel(self, tags: Iterable[int]) -> None:
        """Give up on operations, as `Device.cancel` says."""
        self._queue.cancel(list(tags))

    def register(self, address: int, length: int) -> bool:
        """Pin memory for direct I/O. It must stay mapped until the device is closed.

        On huge pages it is worth most (`forebay.storage.huge_pages.collapse` first): 4 KiB pages cost three times the
        CPU, and bandwidth where the device takes a limited number of segments.
        """
        return self._queue.register(address, length)

    def stats(self) -> DeviceStats:
        """Counters since opening."""
        return DeviceStats._make(self._queue.stats())

    def flush(self) -> None:
        """Nothing to do unless a kind says otherwise."""

    def close(self) -> None:
        """Drop what is queued, wait up to 5 s for what is in flight, and stop the threads.

        Should the device hang in the kernel, its thread and its buffers are left behind rather than the process.
        """
        self._queue.close()
