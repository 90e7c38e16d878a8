"""A named region in /dev/shm that lives as long as any process has it open."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from pathlib import Path

from forebay.storage.errors import DeviceError
from forebay.storage.units import format_bytes

FOLDER = Path("/dev/shm")


class SharedFile:
    """The first to open it allocates it, the last to close it removes it.

    Everyone holds a shared lock; whoever gets it exclusively is alone, even after a crash of all the others.
    """

    def __init__(self, device: str, name: str, size: int) -> None:
        self._device = device
        self._path = FOLDER / name
        self._size = size
        self._fd = self._open()

    def map(self) -> mmap.mmap:
        """The region, `size` bytes."""
        return mmap.mmap(self._fd, self._size, flags=mmap.MAP_SHARED)

    def close(self) -> None:
        """Idempotent."""
        if self._fd < 0:
            return
        if _alone(self._fd) and os.fstat(self._fd).st_nlink:
            self._path.unlink(missing_ok=True)
        os.close(self._fd)
        self._fd = -1

    def _open(self) -> int:
        while True:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                if _alone(fd):
                    self._allocate(fd)
                fcntl.flock(fd, fcntl.LOCK_SH)
                if os.fstat(fd).st_nlink and os.fstat(fd).st_size == self._size:
                    return fd
                if os.fstat(fd).st_nlink:
                    self._refuse(
                        f"{self._path} has {os.fstat(fd).st_size} bytes, not {self._size}", "use one size everywhere"
                    )
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)  # removed by its last user just now: make a new one

    def _allocate(self, fd: int) -> None:
        if not os.fstat(fd).st_nlink:
            return
        os.ftruncate(fd, 0)  # what a crash left behind is of no use
        try:
            os.posix_fallocate(fd, 0, self._size)  # a full /dev/shm shows here instead of as a SIGBUS later
        except OSError as error:
            self._path.unlink(missing_ok=True)
            if error.errno != errno.ENOSPC:
                raise
            self._refuse(
                f"{FOLDER} has no room for {format_bytes(self._size)}", "enlarge it or make the device smaller"
            )

    def _refuse(self, problem: str, fix: str) -> None:
        raise DeviceError(self._device, problem, fix)


def _alone(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
