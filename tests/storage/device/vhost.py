"""Huge pages to share with a server of drives, and whether there is one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.bench.storage_daemon import installed

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
