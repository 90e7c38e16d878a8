"""Moving memory that is in use onto huge pages, so that direct I/O into it comes in few pieces, and few page walks.

A 1 MiB read into scattered 4 KiB pages is 256 pieces for the kernel, the controller and the drive, and often more than
one request; into huge pages it is one. Measured on one virtual machine: 0.45 against 1.8 GB/s, 0.12 against 0.034 CPU
seconds per GB.
"""

from __future__ import annotations

import ctypes
import mmap
import time

HUGE_PAGE = 2 << 20
MADV_COLLAPSE = getattr(mmap, "MADV_COLLAPSE", 25)  # Linux 6.1
SLICE = 64 << 20
BUDGET_SECONDS = 10.0
"""Longest that a start may be held up (our choice); about 0.5 to 1 s per GB."""


def collapse(address: int, length: int, seconds: float = BUDGET_SECONDS) -> int:
    """Move the huge pages that lie wholly within a range of this process's memory together, content and all.

    To be called before the memory is pinned. Never fails: what the kernel refuses, or cannot do in `seconds`, stays on
    small pages.

    Returns:
        How many bytes are on huge pages now, as far as this call can tell.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    start = -(-address // HUGE_PAGE) * HUGE_PAGE
    stop = (address + length) // HUGE_PAGE * HUGE_PAGE
    end = time.monotonic() + seconds
    done = 0
    for at in range(start, stop, SLICE):
        size = min(SLICE, stop - at)
        refused = libc.madvise(at, size, MADV_COLLAPSE) != 0
        done += 0 if refused else size
        # Refused at once: an old kernel, or memory that has no huge pages. Later: no free huge page is left.
        if refused or time.monotonic() > end:
            break
    return done
