"""QEMU's storage daemon as the other side of a vhost-user-blk socket, and huge pages to share with it."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

DAEMON = shutil.which("qemu-storage-daemon")
_PAGES = Path("/proc/sys/vm/nr_hugepages")
_FREE = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")


def need_daemon() -> None:
    """Skip where there is none."""
    if DAEMON is None:
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


class StorageDaemon:
    """Serves a file of so many bytes at a socket, as a context manager.

    Args:
        file: made, sparse, if it is not there.
        socket: where it is served.
        size: bytes of the file.
        filters: more `--blockdev` and `--object` arguments; the last node is served.
        node: name of the node that is served.
    """

    def __init__(
        self, file: Path, socket: Path, size: int = 0, *, filters: tuple[str, ...] = (), node: str = "disk"
    ) -> None:
        self.file, self.socket = file, socket
        if not file.exists():
            with file.open("wb") as made:
                made.truncate(size)
        export = f"type=vhost-user-blk,id=export,node-name={node},addr.type=unix,addr.path={socket},writable=on"
        self._command = [
            DAEMON or "qemu-storage-daemon",
            "--blockdev", f"driver=file,node-name=disk,filename={file},cache.direct=on,aio=threads",
            *filters, "--export", export,
        ]  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> StorageDaemon:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """And wait until it listens."""
        self.socket.unlink(missing_ok=True)
        self._process = subprocess.Popen(self._command)
        end = time.monotonic() + 20
        while not self._listens():
            assert self._process.poll() is None, "the storage daemon has ended"
            assert time.monotonic() < end, "the storage daemon does not listen"
            time.sleep(0.01)

    def _listens(self) -> bool:
        """Without connecting: it serves one client."""
        lines = Path("/proc/net/unix").read_text().splitlines()
        return any(line.endswith(f" {self.socket}") and line.split()[3] == "00010000" for line in lines)

    def kill(self) -> None:
        """As a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """Answer nothing any more."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)
