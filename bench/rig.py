"""Unequal block devices made from one disk: loop devices over written files, throttled by the kernel."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from forebay.bench.fio import fio_read
from forebay.bench.throttle import BURST_SECONDS, Throttle
from forebay.storage.errors import ForebayError
from forebay.storage.units import format_bytes

WRITE_BYTES = 4 << 20


class RigError(ForebayError):
    """The devices of a benchmark cannot be made here."""


@dataclass(frozen=True)
class Rig:
    """Block devices that can be throttled, for as long as the context of `throttled_devices` lasts."""

    devices: tuple[Path, ...]
    throttle: Throttle

    def set_rates(self, rates: Sequence[float]) -> None:
        """Limit the devices, in order, to these read rates (bytes/s)."""
        self.throttle.limit(dict(zip(self.devices, rates, strict=True)))

    def spend_bursts(self) -> None:
        """Read from every device until its limit bites: what is read next comes at the limit, from the first byte."""
        end = time.monotonic() + 2 * BURST_SECONDS
        with ThreadPoolExecutor(len(self.devices)) as threads:
            list(threads.map(lambda device: _read_until(device, end), self.devices))


@contextlib.contextmanager
def throttled_devices(
    folder: Path, sizes: Sequence[int], step: Callable[[int], None] = lambda written: None
) -> Iterator[Rig]:
    """Loop devices of these sizes (bytes) over files in `folder`, unthrottled until `set_rates`.

    Nothing outlives the process, however it ends: the files have no name any more and the loop devices detach
    themselves once nobody holds them open.

    Args:
        folder: on the disk to use; needs room for all sizes together.
        sizes: of the devices.
        step: called with the bytes written so far, of `sum(sizes)`.

    Raises:
        RigError, ThrottleError: not root, no loop devices, no space, no control groups.
    """
    require_space(folder, sum(sizes))
    with contextlib.ExitStack() as stack:
        stack.enter_context(terminated_as_exit())
        throttle = stack.enter_context(Throttle())
        devices = []
        for index, size in enumerate(sizes):
            path = folder / f"device{index}.img"
            stack.callback(path.unlink, missing_ok=True)
            before = sum(sizes[:index])
            write_file(path, size, lambda written, before=before: step(before + written))  # type: ignore[misc]
            devices.append(_attach(path, stack))
            path.unlink()
        yield Rig(tuple(devices), throttle)


def write_file(path: Path, size: int, step: Callable[[int], None] = lambda written: None) -> None:
    """A file of random bytes, every extent written: holes and unwritten extents read too fast.

    Raises:
        RigError: it cannot be written.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_DIRECT, 0o600)
    except OSError:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)
        with mmap.mmap(-1, WRITE_BYTES) as buffer:
            buffer[:] = os.urandom(WRITE_BYTES)
            for offset in range(0, size, WRITE_BYTES):
                os.pwrite(descriptor, memoryview(buffer)[: min(WRITE_BYTES, size - offset)], offset)
                step(min(offset + WRITE_BYTES, size))
        os.fsync(descriptor)
    except OSError as error:
        raise RigError(f"{path}: {error.strerror}; give --work a folder with {format_bytes(size)} free") from None
    finally:
        os.close(descriptor)


def require_space(folder: Path, size: int) -> None:
    """Raise a `RigError` unless `folder` has `size` bytes and a little more."""
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < size * 1.1:
        raise RigError(
            f"{folder} has {format_bytes(free)} free, the benchmark needs {format_bytes(size * 1.1)}; "
            "give --work a folder on a larger disk"
        )


def probe_disk(path: Path, size: int) -> float:
    """Read bandwidth of the disk under a file (bytes/s): the middle of three runs of fio."""
    runs = sorted(fio_read(path, size=size, block=512 << 10, depth=32).bandwidth for _ in range(3))
    return runs[1]


def rates_for(disk: float, wanted: Sequence[float] = (400e6, 200e6, 100e6), part: float = 0.4) -> list[float]:
    """The wanted rates, scaled down together so that their sum is at most `part` of what the disk gives."""
    scale = min(1.0, part * disk / sum(wanted))
    return [rate * scale for rate in wanted]


@contextlib.contextmanager
def terminated_as_exit() -> Iterator[None]:
    """SIGTERM ends the block as an exception does, so that contexts are left in order."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    former = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


def _read_until(device: Path, end: float) -> None:
    descriptor = os.open(device, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    try:
        size = os.lseek(descriptor, 0, os.SEEK_END)
        with mmap.mmap(-1, 64 << 10) as buffer:
            offset = 0
            while time.monotonic() < end:
                os.preadv(descriptor, [buffer], offset % size)
                offset += len(buffer)
    finally:
        os.close(descriptor)


def _attach(path: Path, stack: contextlib.ExitStack) -> Path:
    """A loop device with O_DIRECT over `path` that detaches itself when `stack` closes or the process dies."""
    device = Path(_losetup("--find", "--show", "--direct-io=on", str(path)))
    try:
        descriptor = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
        stack.callback(os.close, descriptor)
    finally:
        # Open somewhere, a loop device is not detached at once but when it is closed for the last time.
        _losetup("--detach", str(device))
    if Path(f"/sys/block/{device.name}/loop/dio").read_text().strip() != "1":
        raise RigError(f"{path}: its file system refuses O_DIRECT to loop devices; give --work a folder on ext4 or XFS")
    return device


def _losetup(*arguments: str) -> str:
    try:
        done = subprocess.run(["losetup", *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise RigError("losetup is missing; install util-linux (Debian: mount)") from None
    if done.returncode:
        raise RigError(f"no loop device: {done.stderr.strip()}; run as root, in a container with --privileged")
    return done.stdout.strip()
