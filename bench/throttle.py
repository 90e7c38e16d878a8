"""A control group that limits how fast this process reads from block devices.

The kernel hands out reads in slices of 100 ms and lets a device that was idle have one slice's bytes at once, so a
short read looks faster than the limit. Whoever compares must read as long on both sides.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from forebay.storage.errors import ForebayError

PREFIX = "forebay-bench-"
BURST_SECONDS = 0.1
"""A slice of the kernel's throttle: after a pause this much of the limit comes for free."""


class ThrottleError(ForebayError):
    """Block devices cannot be throttled here."""


class Throttle:
    """Read limits for this process and its children, as a context manager.

    Works with control groups of version 1 (`blkio`) and 2 (`io`). Entering moves the process into a new group,
    leaving moves it back and removes the group.

    Raises:
        ThrottleError: on entering, when no control group can be made.
    """

    def __init__(self) -> None:
        self._group: Path | None = None
        self._former: Path | None = None
        self._version = 0

    def __enter__(self) -> Self:
        parent, self._former, self._version = _find_controller()
        _remove_abandoned(parent)
        group = parent / f"{PREFIX}{os.getpid()}"
        try:
            group.mkdir(exist_ok=True)
            self._group = group
            _write(group / "cgroup.procs", str(os.getpid()))
        except OSError as error:
            self.__exit__()
            raise _cannot(f"{group}: {error.strerror}") from None
        return self

    def __exit__(self, *exception: object) -> None:
        if self._group is None:
            return
        with contextlib.suppress(OSError):
            _write((self._former or self._group.parent) / "cgroup.procs", str(os.getpid()))
        with contextlib.suppress(OSError):
            self._group.rmdir()
        self._group = None

    def limit(self, rates: Mapping[Path, float]) -> None:
        """Limit reads from these block devices (bytes/s); 0 lifts the limit.

        Raises:
            ThrottleError: the kernel refuses.
        """
        assert self._group is not None, "limit() outside the context"
        for path, rate in rates.items():
            number = os.stat(path).st_rdev
            device = f"{os.major(number)}:{os.minor(number)}"
            try:
                if self._version == 1:
                    _write(self._group / "blkio.throttle.read_bps_device", f"{device} {rate:.0f}")
                else:
                    _write(self._group / "io.max", f"{device} rbps={f'{rate:.0f}' if rate else 'max'}")
            except OSError as error:
                raise _cannot(f"{path} at {rate:.0f} B/s: {error.strerror}") from None


def _find_controller() -> tuple[Path, Path, int]:
    """(group to make ours in, group we are in, version) of the hierarchy that limits block I/O."""
    own = _own_groups()
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        mount = Path(left.split()[4])
        kind, _, options = right.split()[:3]
        if kind == "cgroup" and "blkio" in options.split(","):
            former = mount / own.get("blkio", "")
            return _existing(former, mount), _existing(former, mount), 1
        if kind == "cgroup2" and _enable_io(mount):
            return mount, _existing(mount / own.get("", ""), mount), 2
    raise _cannot("no control group hierarchy with a blkio or io controller is mounted")


def _own_groups() -> dict[str, str]:
    """Controller -> path of this process's group; the unified hierarchy under ''."""
    groups: dict[str, str] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            groups[controller] = path.lstrip("/")
    return groups


def _existing(path: Path, otherwise: Path) -> Path:
    """In a container the path in /proc may be the host's: then the mount is our group."""
    return path if path.is_dir() else otherwise


def _enable_io(mount: Path) -> bool:
    if "io" not in (mount / "cgroup.controllers").read_text().split():
        return False
    with contextlib.suppress(OSError):
        _write(mount / "cgroup.subtree_control", "+io")
    return "io" in (mount / "cgroup.subtree_control").read_text().split()


def _remove_abandoned(parent: Path) -> None:
    """Groups of runs that were killed: the kernel refuses for those in use."""
    for group in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            group.rmdir()


def _write(path: Path, text: str) -> None:
    path.write_text(text + "\n")


def _cannot(problem: str) -> ThrottleError:
    return ThrottleError(
        f"cannot throttle block devices ({problem}); run as root on the host, or in a container with "
        f"--privileged --cgroupns=host, or leave these rows out with --only"
    )
