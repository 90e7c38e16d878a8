"""Memory of this host as a device: copies by native threads, checksums computed on the way."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from pathlib import Path

from forebay.storage.config import BLOCK, DeviceConfig
from forebay.storage.device import shared_memory
from forebay.storage.device._native import Queue, bind_memory
from forebay.storage.device.engine import NativeDevice
from forebay.storage.errors import DeviceError
from forebay.storage.units import format_bytes

ALIGNMENT = 64
"""A cache line: copies of neighbouring extents share none (bytes; our choice)."""

THREADS = 2
"""Copying threads: one saturates a core's share of memory bandwidth, two suffice beside SSDs (our choice)."""

HUGE_PAGE = 2 << 20
MAP_HUGETLB = 0x40000


class DramDevice(NativeDevice):
    """A region of memory, private to the process or shared by name with others of this host.

    Pages are taken on first write, so that opening a large region costs no time. On huge pages where they can be
    had; bound to `numa_node` when the host has more than one.
    """

    def __init__(self, config: DeviceConfig, *, capacity: int | None = None, shared: str | None = None) -> None:
        size = capacity if capacity is not None else config.size
        if size is None or size < BLOCK:
            raise DeviceError(config.name, f"size is {size} bytes, less than {BLOCK}", "make it larger")
        size -= size % BLOCK
        self._file = None if shared is None else shared_memory.SharedFile(config.name, shared, size)
        self._memory = _map_private(config, size) if self._file is None else self._file.map()
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        """Where the region begins, `capacity` bytes long; for registering it with other hardware."""
        _place(config, self._memory, self.address)
        super().__init__(
            Queue("memory", f"kv-{config.name}", size, min(THREADS, config.depth), address=self.address,
                  offset_alignment=ALIGNMENT),
            name=config.name, kind="dram", capacity=size, alignment=ALIGNMENT, persistent=False,
        )  # fmt: skip

    def register(self, address: int, length: int) -> bool:
        """Copies need no registration: always True."""
        return True

    def close(self) -> None:
        """Stop the threads and give the memory back."""
        if self._queue.close():
            self._memory.close()
        if self._file is not None:
            self._file.close()


def _map_private(config: DeviceConfig, size: int) -> mmap.mmap:
    available = _available_memory()
    if size > available:
        raise DeviceError(
            config.name,
            f"size {format_bytes(size)} is more than the {format_bytes(available)} of memory available",
            "make it smaller",
        )
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if config.huge_pages and config.numa_node is None:  # bound and reserved huge pages together can end in SIGBUS
        try:
            return mmap.mmap(-1, -(-size // HUGE_PAGE) * HUGE_PAGE, flags=flags | MAP_HUGETLB)
        except OSError:
            pass  # none reserved, which is usual
    try:
        return mmap.mmap(-1, size, flags=flags)
    except OSError as error:
        raise DeviceError(
            config.name, f"{format_bytes(size)} cannot be mapped ({error.strerror})", "make it smaller"
        ) from None


def _available_memory() -> int:
    """Bytes that this process may still take: free memory of the host, or of its control group if that is less."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    host = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        return host if limit == "max" else min(host, int(limit) - int((group / "memory.current").read_text()))
    except (OSError, ValueError):
        return host


def _place(config: DeviceConfig, memory: mmap.mmap, address: int) -> None:
    """Ask for transparent huge pages and for the NUMA node."""
    if config.huge_pages:
        with contextlib.suppress(OSError):  # a kernel without them: 4 KiB pages serve as well, a little slower
            memory.madvise(mmap.MADV_HUGEPAGE)
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))
    if config.numa_node is None or (nodes <= 1 and config.numa_node == 0):
        return
    try:
        bind_memory(address, len(memory), config.numa_node)
    except OSError as error:
        raise DeviceError(
            config.name, f"cannot bind to numa_node {config.numa_node} of {max(nodes, 1)} ({error.strerror})",
            "correct it or leave numa_node out",
        ) from None  # fmt: skip
