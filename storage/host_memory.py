"""Memory on huge pages that other processes and hardware may reach: a file without a name, mapped once."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

from forebay.storage.errors import PoolError
from forebay.storage.units import format_bytes

HUGE_PAGE = 2 << 20
PAGE = 4096
_HUGE_2MB = 21 << 26  # MFD_HUGE_2MB
_FREE = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")


class HostMemory:
    """One region, handed out from its beginning and never taken back in part.

    SPDK maps whole pages of 2 MiB for the drive, so the region consists of reserved huge pages, which never move and
    are never swapped.

    Args:
        size: bytes, rounded up to whole huge pages.

    Raises:
        PoolError: fewer huge pages are free; the message has the command that reserves them.
    """

    def __init__(self, size: int) -> None:
        self.size = -(-size // HUGE_PAGE) * HUGE_PAGE
        self._taken = 0
        try:
            self.fd = os.memfd_create("forebay", os.MFD_CLOEXEC | os.MFD_HUGETLB | _HUGE_2MB)
            try:
                os.ftruncate(self.fd, self.size)
                self._map = mmap.mmap(self.fd, self.size)
            except BaseException:
                os.close(self.fd)
                raise
        except OSError as error:
            raise PoolError(_advice(self.size, error)) from None
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        """Where it begins in this process."""

    @property
    def left(self) -> int:
        """Bytes not handed out yet."""
        return self.size - self._taken

    def holds(self, address: int, length: int) -> bool:
        """Whether these bytes are part of it."""
        return self.address <= address and address + length <= self.address + self.size

    def take(self, size: int) -> int:
        """The address of so many bytes, on a page.

        Raises:
            PoolError: there are not so many left.
        """
        if size > self.left:
            raise PoolError(f"{format_bytes(size)} of shared memory are asked for, {format_bytes(self.left)} are left")
        address = self.address + self._taken
        self._taken += -(-size // PAGE) * PAGE
        return address

    def close(self) -> None:
        """Give it back; other processes that map it keep it until they let go. Nothing may use it any more."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self._map.close()


def _advice(size: int, error: OSError) -> str:
    pages = size // HUGE_PAGE
    try:
        free = int(_FREE.read_text())
    except (OSError, ValueError):
        return f"this kernel has no 2 MiB pages ({error.strerror}); use devices of kind `file`"
    total = "/proc/sys/vm/nr_hugepages"
    return (
        f"{pages} huge pages of 2 MiB are needed, {free} are free ({error.strerror}); as root run "
        f"`echo $(($(cat {total}) + {max(1, pages - free)})) > {total}`, or use devices of kind `file`"
    )
