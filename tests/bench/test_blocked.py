"""The sampler tells threads that wait for I/O from those that wait for something else or run."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import pytest

from forebay.bench.blocked import BlockedSampler, can_sample, threads
from tests.support import require


def watch(body: Callable[[], object], seconds: float = 0.4) -> float:
    """Share of the time that a thread running `body` counts as blocked."""
    before = threads()
    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    (found,) = threads() - before
    with BlockedSampler([found]) as sampler:
        time.sleep(seconds)
    return sampler.seconds / seconds


@pytest.fixture(autouse=True)
def _possible() -> None:
    require(can_sample(), "the kernel does not show the system calls of threads")


def test_a_read_that_waits_counts() -> None:
    reader, writer = os.pipe()
    assert watch(lambda: os.read(reader, 1)) == pytest.approx(1, abs=0.3)
    os.write(writer, b"x")


def test_waiting_for_a_lock_does_not() -> None:
    event = threading.Event()
    assert watch(event.wait) == 0
    event.set()


def test_running_does_not() -> None:
    stop = time.monotonic() + 0.6

    def spin() -> None:
        while time.monotonic() < stop:
            pass

    assert watch(spin) < 0.2
