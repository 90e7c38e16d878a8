"""fio as the judge of what a device can do: io_uring, O_DIRECT, one job, as deep as the pool."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.storage.errors import ForebayError

NR_HUGEPAGES = Path("/proc/sys/vm/nr_hugepages")
HUGE_PAGE = 2 << 20


class FioError(ForebayError):
    """fio is missing or refused the job."""


@dataclass(frozen=True, slots=True)
class FioResult:
    """What one fio job reported."""

    bytes: int
    seconds: float
    """From its first request to its last answer, in whole milliseconds; its start-up is not counted."""
    cpu_seconds: float
    """User and system time of the job."""

    @property
    def bandwidth(self) -> float:
        """Bytes per second."""
        return self.bytes / self.seconds


def fio_version() -> str:
    """`fio-3.33`, or an empty string where there is none."""
    if shutil.which("fio") is None:
        return ""
    return subprocess.run(["fio", "--version"], capture_output=True, text=True, check=False).stdout.strip()


@contextlib.contextmanager
def reserved_huge_pages(size: int) -> Iterator[bool]:
    """Set `size` bytes of huge pages aside for as long as the context lasts; yields whether that could be done."""
    try:
        former = int(NR_HUGEPAGES.read_text())
        free = _free_huge_pages()
        NR_HUGEPAGES.write_text(str(former + -(-size // HUGE_PAGE)))
    except OSError:  # not root, or no huge pages in this kernel
        yield False
        return
    try:
        yield (_free_huge_pages() - free) * HUGE_PAGE >= size
    finally:
        NR_HUGEPAGES.write_text(str(former))


def _free_huge_pages() -> int:
    return next(int(line.split()[1]) for line in open("/proc/meminfo") if line.startswith("HugePages_Free"))


def fio_read(
    path: Path,
    *,
    size: int,
    block: int,
    depth: int,
    offset: int = 0,
    fixed_buffers: bool = True,
    huge_pages: bool = False,
) -> FioResult:
    """Read `size` bytes of a file or block device from front to back.

    Args:
        path: file or block device.
        size: bytes to read.
        block: bytes per request.
        depth: requests in flight.
        offset: where to start (bytes).
        fixed_buffers: register buffers and file with the ring.
        huge_pages: buffers on huge pages, which `reserved_huge_pages` must have set aside.

    Raises:
        FioError: fio is missing or failed; with its own words.
    """
    job = {
        "name": "read",
        "filename": str(path).replace(":", r"\:"),
        "rw": "read",
        "ioengine": "io_uring",
        "direct": 1,
        "bs": block,
        "iodepth": depth,
        "size": size,
        "offset": offset,
        "fixedbufs": int(fixed_buffers),
        "registerfiles": int(fixed_buffers),
        "thread": 1,
        "allow_file_create": 0,
    }
    if huge_pages:
        job["iomem"] = "shmhuge"
    report = _run([f"--{key}={value}" for key, value in job.items()])
    return _parse(report)


def _run(options: list[str]) -> dict[str, Any]:
    if shutil.which("fio") is None:
        raise FioError("fio is not installed, and it is the peer here; install it, for example `apt-get install fio`")
    command = ["fio", "--output-format=json", *options]
    environment = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        words = (done.stderr or done.stdout).strip().splitlines()
        raise FioError(f"fio failed: {words[0] if words else f'exit status {done.returncode}'}")
    result: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
    return result


def _parse(report: dict[str, Any]) -> FioResult:
    job = report["jobs"][0]
    if job["error"]:
        raise FioError(f"fio failed: {os.strerror(job['error'])}")
    read = job["read"]
    seconds = max(read["runtime"], 1) / 1e3
    cpu_seconds = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
    return FioResult(read["io_bytes"], seconds, cpu_seconds)
