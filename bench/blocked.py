"""How long threads sit blocked in I/O, by one method for everybody: looking at them, about 200 times a second.

`/proc/self/task/<tid>/syscall` names the system call in which a thread sleeps, and says `running` for one that runs or
waits for a core. A thread counts as blocked in I/O when it sleeps in a call that reads files: read and its kin,
open and close, or io_uring_enter; waiting for a lock or for work to do does not count. Worker threads of io_uring make
no calls, so of them it counts that they are in uninterruptible sleep.

The kernel's own delay accounting would be simpler, but since Linux 6.12 it charges sleeps to the wrong thread.
"""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import Self

PERIOD = 0.005
"""Seconds between two looks: below 5% of a core for 20 threads (our choice)."""

_CALLS = {
    "x86_64": {
        "read": 0,
        "open": 2,
        "close": 3,
        "pread64": 17,
        "readv": 19,
        "openat": 257,
        "preadv": 295,
        "preadv2": 327,
    },
    "aarch64": {"read": 63, "close": 57, "pread64": 67, "readv": 65, "openat": 56, "preadv": 69, "preadv2": 286},
}
_IO_URING_ENTER = 426  # on all architectures
_POLL = {"x86_64": 7, "aarch64": 73}


def can_sample() -> bool:
    """Whether this kernel shows what its threads sleep in."""
    return platform.machine() in _CALLS and Path("/proc/self/syscall").exists()


def threads() -> set[int]:
    """The threads of this process."""
    return {int(name) for name in os.listdir("/proc/self/task")}


class BlockedSampler:
    """Watches threads from another thread for as long as the context lasts.

    Args:
        watched: thread ids. Worker threads of io_uring are watched in any case.
        polls: count sleeping in poll, too: for threads that wait for devices there.
    """

    def __init__(self, watched: Collection[int], *, polls: bool = False) -> None:
        self._watched = sorted(watched)
        self._calls = {str(number) for number in (*_CALLS[platform.machine()].values(), _IO_URING_ENTER)}
        self._calls |= {str(_POLL[platform.machine()])} if polls else set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="blocked-sampler", daemon=True)
        self._started = 0.0
        self._looks = 0
        self._hits = 0
        self.seconds = 0.0
        """Thread-seconds blocked in I/O, once the context has ended."""
        self.own_cpu_seconds = 0.0
        """CPU time that looking took."""

    def __enter__(self) -> Self:
        self._started = time.perf_counter()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self.seconds = self._hits / max(self._looks, 1) * (time.perf_counter() - self._started)

    def _run(self) -> None:
        while not self._stop.wait(PERIOD):
            self._looks += 1
            self._hits += sum(self._in_call(thread) for thread in self._watched) + _blocked_workers(self._watched)
        self.own_cpu_seconds = time.thread_time()

    def _in_call(self, thread: int) -> bool:
        try:
            with open(f"/proc/self/task/{thread}/syscall") as file:
                return file.read().split(" ", 1)[0] in self._calls
        except OSError:  # it has ended
            return False


def _blocked_workers(known: Collection[int]) -> int:
    """Worker threads of io_uring in uninterruptible sleep."""
    count = 0
    for thread in threads().difference(known):
        try:
            with open(f"/proc/self/task/{thread}/stat") as file:
                name, _, rest = file.read().partition("(")[2].rpartition(")")
        except OSError:
            continue
        count += name.startswith("iou-wrk") and rest.split(" ", 2)[1] == "D"
    return count
