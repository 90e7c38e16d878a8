"""Linear assignments, several at a time.

scipy solves one assignment on one core and holds Python's lock meanwhile, so each solver is a process of its own. Costs
lie in memory that all of them see; through pipes go an expert's number and the units that were found.
"""

from __future__ import annotations

import mmap
import os
import queue
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

WORTH = 4 * 10**7
"""Costs of all experts together from which processes save more time than their start takes (our choice)."""
FLOAT = 4
"""Bytes."""


def solvers(experts: int, units: int) -> int:
    """How many processes to use: 0 solves in this one."""
    cores = len(os.sched_getaffinity(0))
    return min(cores, experts) if cores > 1 and experts * units * units >= WORTH else 0


def solve(cost: np.ndarray) -> np.ndarray:
    """The column for each row, at the least total cost."""
    from scipy.optimize import linear_sum_assignment  # serving must not need scipy

    columns: np.ndarray = linear_sum_assignment(cost)[1]
    return columns


class Assignments:
    """Square cost matrices of several experts, and their solutions. A context manager.

    Args:
        experts: how many matrices.
        units: their size.
        processes: that solve them; 0 is none but this one.
    """

    def __init__(self, experts: int, units: int, processes: int) -> None:
        import torch

        self._units = units
        self._file = os.memfd_create("forebay-costs")
        os.ftruncate(self._file, experts * units * units * FLOAT)
        self._memory = mmap.mmap(self._file, 0)
        self.costs_EHH: Tensor = torch.frombuffer(self._memory, dtype=torch.float32).view(experts, units, units)
        """Not to be changed between `submit` and its result."""
        self._idle: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
        self._processes = [self._start(experts) for _ in range(processes)]
        self._threads = ThreadPoolExecutor(processes) if processes else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()
        if self._threads:
            self._threads.shutdown()
        del self.costs_EHH, self._memory
        os.close(self._file)

    def submit(self, expert: int) -> Future[np.ndarray]:
        """Start to solve one matrix."""
        if self._threads:
            return self._threads.submit(self._ask, expert)
        done: Future[np.ndarray] = Future()
        done.set_result(solve(self.costs_EHH[expert].numpy()))
        return done

    def _start(self, experts: int) -> subprocess.Popen[bytes]:
        costs = f"/proc/{os.getpid()}/fd/{self._file}"
        command = [sys.executable, "-m", __name__, costs, str(experts), str(self._units)]
        # In a session of its own, or the user's Ctrl-C would reach it too and make it complain.
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True)
        self._idle.put(process)
        return process

    def _ask(self, expert: int) -> np.ndarray:
        """A process that has died is left out; its work is done here."""
        process = self._idle.get()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(b"%d\n" % expert)
            process.stdin.flush()
            answer = process.stdout.read(self._units * FLOAT)
        except OSError:
            answer = b""
        self._idle.put(process)
        if len(answer) < self._units * FLOAT:
            return solve(self.costs_EHH[expert].numpy())
        return np.frombuffer(answer, dtype=np.int32)


def serve(costs: str, experts: int, units: int) -> None:
    """Solve what is asked for on standard input, until it ends."""
    cost_EHH = np.memmap(costs, dtype=np.float32, mode="r", shape=(experts, units, units))
    for line in sys.stdin:
        sys.stdout.buffer.write(solve(cost_EHH[int(line)]).astype(np.int32).tobytes())
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
