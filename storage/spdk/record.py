"""What we made in a target, on file, so that `detach` undoes that and nothing else.

It is written before the target is asked: after a crash in between, the record names something that may not be there,
never the other way round. Whoever reads it compares it with what the target has.

As root it lies under /run, which like the target's own state does not outlive a reboot; for others under
`$XDG_STATE_HOME`. Not beside the RPC socket: that folder, /var/tmp, is everybody's, and who can write this file says
what `detach` removes.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from forebay.storage.errors import ForebayError

FORMAT = 1


class RecordError(ForebayError):
    """The record cannot be read or written; the message says what to do."""


@dataclass(slots=True)
class Record:
    """What `attach` made."""

    path: Path
    target: str
    """The RPC socket it belongs to."""
    controllers: dict[str, str] = field(default_factory=dict)
    """vhost controller -> its bdev."""
    drives: dict[str, str] = field(default_factory=dict)
    """NVMe controller -> PCI address."""

    def made(self, controller: str, bdev: str | None) -> bool:
        """Whether the target's controller is the one that we made; `bdev` is None when its bdev has vanished."""
        return controller in self.controllers and bdev in (None, self.controllers[controller])

    def save(self) -> None:
        """Durably, whole or not at all. An empty record is deleted."""
        try:
            if not self.controllers and not self.drives:
                self.path.unlink(missing_ok=True)
                return
            self._write()
        except OSError as error:
            raise RecordError(f"{self.path}: {error.strerror}; give another --state") from None

    def _write(self) -> None:
        content = {"format": FORMAT} | {key: value for key, value in asdict(self).items() if key != "path"}
        new = self.path.with_name(self.path.name + ".new")
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(content, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        new.replace(self.path)


def default_path(target: Path) -> Path:
    """Where the record for the target at this RPC socket lies."""
    if os.geteuid() == 0:
        folder = Path("/run")
    else:
        folder = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state")
    return folder / "forebay" / f"spdk{str(target.resolve()).replace('/', '-')}.json"


def load(path: Path, target: Path) -> Record:
    """The record at `path`, an empty one where there is none.

    Raises:
        RecordError: it is damaged, or belongs to another target.
    """
    try:
        content = json.loads(path.read_text())
        record = Record(path, content["target"], _names(content["controllers"]), _names(content["drives"]))
        known = content["format"] == FORMAT
    except FileNotFoundError:
        return Record(path, str(target.resolve()))
    except OSError as error:
        raise RecordError(f"{path}: {error.strerror}; give another --state") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        known = False
    if not known:
        raise RecordError(
            f"{path} is not a record of `forebay spdk attach`; move it away, after which what it named is nobody's"
        )
    if record.target != str(target.resolve()):
        raise RecordError(
            f"{path} is of the target at {record.target}, not {target}; give its --socket, or another --state"
        )
    return record


@contextlib.contextmanager
def opened(path: Path, target: Path) -> Iterator[Record]:
    """The record, for one process at a time.

    Raises:
        RecordError: another process changes it, or it cannot be used.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise RecordError(f"{path}: {error.strerror}; give another --state") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RecordError(f"another `forebay spdk` changes {path} right now; try again when it is done") from None
        yield load(path, target)
    finally:
        os.close(lock)


def _names(value: dict[str, str]) -> dict[str, str]:
    return {str(key): str(entry) for key, entry in value.items()}
