"""fio as the judge of what a device can do: io_uring, O_DIRECT, one job, as deep as the pool."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.storage.errors import ForebayError


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


def fio_read(
    path: Path, *, size: int, block: int, depth: int, offset: int = 0, fixed_buffers: bool = True, seconds: float = 0.0
) -> FioResult:
    """Read `size` bytes of a file or block device from front to back.

    Args:
        path: file or block device.
        size: bytes to read, or with `seconds` the part to read again and again.
        block: bytes per request.
        depth: requests in flight.
        offset: where to start (bytes).
        fixed_buffers: register buffers and file with the ring.
        seconds: read for so long, after a ramp of 0.3 s that does not count (past the burst of a throttle).

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
    if seconds:
        job |= {"time_based": 1, "runtime": f"{seconds * 1e3:.0f}ms", "ramp_time": "300ms"}
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
