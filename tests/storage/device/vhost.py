"""Huge pages to share with a server of drives, and such a server on DPDK's rte_vhost."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from forebay.bench.storage_daemon import listens

_PAGES = Path("/proc/sys/vm/nr_hugepages")
_FREE = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")


@contextlib.contextmanager
def huge_pages(count: int) -> Iterator[None]:
    """At least so many free ones of 2 MiB, given back afterwards. Needs root."""
    before = int(_PAGES.read_text())
    try:
        _PAGES.write_text(str(before + max(0, count - int(_FREE.read_text()))))
        assert int(_FREE.read_text()) >= count, f"{2 * count} MiB of memory must be free in pieces of 2 MiB"
        yield
    finally:
        _PAGES.write_text(str(before))


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
