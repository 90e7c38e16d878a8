"""QEMU's storage daemon: a server of drives over vhost-user-blk, as SPDK's target is one, on any machine."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, Self

from forebay.storage.errors import ForebayError

DAEMON = "qemu-storage-daemon"
START_LIMIT = 20.0
"""Seconds until it listens."""


class StorageDaemonError(ForebayError):
    """It is missing or does not start."""


class StorageDaemon:
    """Serves a file at a socket to one client, as a context manager.

    Args:
        file: made, sparse, if it is not there.
        socket: where it is served.
        size: bytes of the file.
        aio: how it reads the file: `threads`, `native` or `io_uring`.
        filters: more `--blockdev` and `--object` arguments, on the node `disk`.
        node: name of the node that is served.

    Raises:
        StorageDaemonError: on starting.
    """

    def __init__(
        self,
        file: Path,
        socket: Path,
        size: int = 0,
        *,
        aio: str = "threads",
        filters: tuple[str, ...] = (),
        node: str = "disk",
    ) -> None:
        self.file, self.socket = file, socket
        if not file.exists():
            with file.open("wb") as made:
                made.truncate(size)
        export = f"type=vhost-user-blk,id=export,node-name={node},addr.type=unix,addr.path={socket},writable=on"
        self._command = [
            DAEMON, "--blockdev", f"driver=file,node-name=disk,filename={file},cache.direct=on,aio={aio}",
            *filters, "--export", export,
        ]  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """And wait until it listens."""
        if shutil.which(DAEMON) is None:
            raise StorageDaemonError(f"{DAEMON} is not installed; on Debian: apt-get install qemu-system-common")
        self.socket.unlink(missing_ok=True)
        self._process = subprocess.Popen(self._command)
        end = time.monotonic() + START_LIMIT
        while not listens(self.socket):
            if self._process.poll() is not None or time.monotonic() > end:
                self.kill()
                raise StorageDaemonError(f"{DAEMON} does not listen at {self.socket}; its own words are above")
            time.sleep(0.01)

    def kill(self) -> None:
        """As a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """Answer nothing any more."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        assert self._process is not None, "it runs"
        self._process.send_signal(number)


def listens(socket: Path) -> bool:
    """Whether a server is there; without connecting, as it may serve one client."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    return any(line.endswith(f" {socket}") and line.split()[3] == "00010000" for line in lines)


def throttled(rate: float) -> dict[str, Any]:
    """Arguments for a daemon that serves no faster (bytes/s)."""
    group = f"throttle-group,id=limit,x-bps-total={int(rate)}"
    node = "driver=throttle,node-name=limited,throttle-group=limit,file=disk"
    return {"filters": ("--object", group, "--blockdev", node), "node": "limited"}
