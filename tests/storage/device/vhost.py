"""Huge pages to share with a server of drives, whether there is one, and one on DPDK's rte_vhost."""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.bench.storage_daemon import installed, listens
from tests.storage.device.rte_target import LIBRARY

_PAGES = Path("/proc/sys/vm/nr_hugepages")
_FREE = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")


def need_daemon() -> None:
    """Skip where there is none."""
    if not installed():
        pytest.skip("qemu-storage-daemon is not installed (Debian: qemu-system-common)")


@contextlib.contextmanager
def huge_pages(count: int) -> Iterator[None]:
    """At least so many free ones of 2 MiB, given back afterwards; skips where they cannot be reserved."""
    before = int(_PAGES.read_text())
    try:
        with contextlib.suppress(PermissionError):
            _PAGES.write_text(str(before + max(0, count - int(_FREE.read_text()))))
        if int(_FREE.read_text()) < count:
            pytest.skip(f"{count} huge pages cannot be reserved (needs root and {2 * count} MiB of free memory)")
        yield
    finally:
        with contextlib.suppress(PermissionError):
            _PAGES.write_text(str(before))


def need_rte_vhost() -> None:
    """Skip where it is not installed."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        pytest.skip(f"{LIBRARY} is not installed (Debian 12: librte-vhost23)")


@contextlib.contextmanager
def rte_target(file: Path, socket: Path, size: int) -> Iterator[None]:
    """Serves a file, made if it is not there, at a socket, to any number of clients."""
    if not file.exists():
        with file.open("wb") as made:
            made.truncate(size)
    command = [sys.executable, "-m", "tests.storage.device.rte_target", str(socket), str(file)]
    with subprocess.Popen(
        command, cwd=Path(__file__).parents[3], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            end = time.monotonic() + 20
            while not listens(socket):
                assert process.poll() is None, "the target has ended"
                assert time.monotonic() < end, "the target does not listen"
                time.sleep(0.01)
            yield
        finally:
            process.kill()
