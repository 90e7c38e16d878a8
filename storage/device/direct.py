"""Finding out what O_DIRECT asks of a file, by trying: file systems that document it are few."""

from __future__ import annotations

import errno
import mmap
import os
from typing import NamedTuple

_PAGE = 4096


class Alignments(NamedTuple):
    """What reads and writes must keep to (bytes, powers of two)."""

    offset: int
    length: int
    memory: int


BUFFERED = Alignments(offset=512, length=1, memory=1)
"""Through the page cache anything goes; offsets keep to sectors all the same."""


def probe(fd: int) -> Alignments | None:
    """The smallest alignments with which `fd`, opened with O_DIRECT, can be read; None when it cannot at all.

    Reads the first 8 KiB, which must be there.
    """
    with mmap.mmap(-1, 4 * _PAGE) as memory:
        sector = next((size for size in (512, 1024, 2048, _PAGE) if _reads(fd, memory, 0, size, size)), None)
        if sector is None:
            return None
        # Over page boundaries: the kernel does not look at the address of what fits into one page. Each address is an
        # odd multiple of the tried alignment, so that a larger one does not pass by accident.
        candidates = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, _PAGE)
        address = next(size for size in candidates if _reads(fd, memory, size, 2 * _PAGE, 0))
        return Alignments(offset=sector, length=sector, memory=address)


def _reads(fd: int, memory: mmap.mmap, at: int, length: int, offset: int) -> bool:
    with memoryview(memory) as whole, whole[at : at + length] as piece:
        try:
            return os.preadv(fd, [piece], offset) == length
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False
