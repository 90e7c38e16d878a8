"""The index made durable: one append-only file per pool, written by the owner, made safe in the background.

The owner's records reach the kernel with `write`, so they survive a `kill -9` from then on. A background thread calls
fdatasync about once a second (group commit), which bounds what a power failure can take, and rewrites the file when
more than half of it is garbage. An error of the file system never reaches the engine: the journal notes it, stops,
and the pool goes on without.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterable
from pathlib import Path

from forebay.storage import records
from forebay.storage.errors import JournalError

logger = logging.getLogger(__name__)

COMMIT_PERIOD = 1.0
"""Seconds between group commits (our choice)."""
COMPACT_FROM = 1 << 20
"""A journal smaller than this is not worth compacting (bytes; our choice)."""


class Journal:
    """An open journal. `append` and `write` belong to the owner thread."""

    def __init__(self, path: Path, period: float = COMMIT_PERIOD) -> None:
        self.path = path
        self.size = 0
        """Bytes in the file."""
        self.live = 0
        """Bytes that a compaction would keep."""
        self.problem = ""
        """What the file system said when the journal stopped; empty while it works."""
        self._fd = -1
        self._buffer: list[bytes] = []
        self._lock = threading.Lock()
        self._unsynced = False
        self._compact_from = COMPACT_FROM
        self._period = period
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def resume(self, found: records.Replay) -> None:
        """Go on behind the sound part of the file."""
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
            os.ftruncate(self._fd, found.end)
            os.lseek(self._fd, found.end, os.SEEK_SET)
        except OSError as error:
            self._give_up(error)
        self.size, self.live = found.end, found.live
        self._start()

    def rewrite(self, content: Iterable[bytes]) -> None:
        """Replace the file, in one step, by the preamble and `content`. A journal that had stopped works again."""
        self._halt()
        try:
            self._adopt(self._write_new(content))
        except OSError as error:
            self._give_up(error)
            return
        self.problem = ""
        self.live = self.size
        self._start()

    def append(self, record: bytes, live: int = 0) -> None:
        """Queue a record for the next `write`.

        Args:
            record: one of `records`.
            live: change of the bytes that a compaction would keep.
        """
        if not self.problem:
            self._buffer.append(record)
            self.live += live

    def write(self) -> None:
        """Hand everything queued to the kernel: from here on it survives the process."""
        if not self._buffer:
            return
        data = records.frame(self._buffer)
        self._buffer.clear()
        try:
            with self._lock:
                _write_all(self._fd, data)
                self.size += len(data)
                self._unsynced = True
        except OSError as error:
            self._give_up(error)

    def commit(self) -> None:
        """Make everything written safe from a power failure. Blocks."""
        if self._unsynced and not self.problem:
            self._unsynced = False
            try:
                os.fdatasync(self._fd)
            except OSError as error:
                self._give_up(error)

    def compact_if_due(self) -> None:
        """Drop the garbage when it is more than half of the file. Blocks; the owner may go on appending meanwhile."""
        if self.problem or self.size < self._compact_from or self.size < 2 * self.live:
            return
        try:
            self._compact()
            self._compact_from = COMPACT_FROM
        except (OSError, JournalError) as error:
            self._compact_from = 2 * self.size
            logger.warning("journal %s: cannot be compacted (%s); it goes on growing", self.path, error)

    def close(self) -> None:
        """Stop the background thread, write and commit what is queued; idempotent."""
        self._halt()
        self.write()
        self.commit()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _halt(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _start(self) -> None:
        if self._thread is None:
            self._stop.clear()
            self._thread = threading.Thread(target=self._run, name="forebay-journal", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self._period):
            self.commit()
            self.compact_if_due()

    def _compact(self) -> None:
        """Copy what is live into a new file, then what was appended meanwhile, and swap the two."""
        with self._lock:
            size = self.size
        data = os.pread(self._fd, size, 0)
        found = records.replay(data, str(self.path))
        if found is None or found.end != size:
            raise OSError(f"{self.path} holds {len(data)} bytes, {size} were written")
        fd = self._write_new(records.live_records(data, found))
        with self._lock:
            try:
                _write_all(fd, os.pread(self._fd, self.size - size, size))
                self._adopt(fd)
                self._unsynced = True
            finally:
                if fd != self._fd:
                    os.close(fd)

    def _write_new(self, content: Iterable[bytes]) -> int:
        """A complete new file beside the old one, safe on disk: its descriptor."""
        fd = os.open(self._new_path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            _write_all(fd, b"".join(records.whole_file(content)))
            os.fsync(fd)
        except OSError:
            os.close(fd)
            with contextlib.suppress(OSError):
                self._new_path.unlink()
            raise
        return fd

    def _adopt(self, fd: int) -> None:
        """Make the new file the journal."""
        self._new_path.replace(self.path)
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = fd
        self.size = os.lseek(fd, 0, os.SEEK_END)
        folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    @property
    def _new_path(self) -> Path:
        return self.path.with_suffix(".new")

    def _give_up(self, error: OSError) -> None:
        """Note the first error; from now on nothing is recorded."""
        if not self.problem:
            self.problem = f"{error.strerror or error}"
            logger.error("journal %s: %s; the pool goes on, but a restart may find it cold", self.path, self.problem)
        self._buffer.clear()


def read(path: Path) -> bytes:
    """The journal's bytes; empty when there is none.

    Raises:
        JournalError: it exists and cannot be read.
    """
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise JournalError(f"{path}: cannot be read ({error.strerror}); check owner and permissions") from None


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
