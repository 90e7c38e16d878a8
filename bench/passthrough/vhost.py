"""A drive over vhost-user-blk against the kernel: `vhost_vs_direct_1m_qd4` and what it costs this process.

One file: fio reads it with io_uring and O_DIRECT, registered buffers on huge pages; we read it through QEMU's storage
daemon, which does the same on the other side of a shared queue. And the same bytes as a file for each chunk, as disk
tiers of engines keep them, read by open, readinto and close, with as many threads as are fastest.

A thread is blocked while it sleeps in a call that reads files (`bench/blocked.py`). The thread of our device makes no
such call: it sleeps in poll until the server signals, which is told beside it as waiting.
"""

from __future__ import annotations

import os
import select
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from forebay.bench.blocked import BlockedSampler, threads
from forebay.bench.fio import fio_read, reserved_huge_pages
from forebay.bench.rig import require_space
from forebay.bench.rounds import Series, interleave
from forebay.bench.storage_daemon import StorageDaemon
from forebay.bench.suite import Context, Measurement, medians
from forebay.storage.config import DeviceConfig
from forebay.storage.device import host_memory, open_device, prepare_device, superblock
from forebay.storage.device.base import Device, Direction, Op

MIB = 1 << 20
BLOCK, DEPTH = MIB, 4
TOTAL, QUICK_TOTAL = 2048 * MIB, 768 * MIB
READERS = (1, 4, 16)
"""Threads of the file-per-chunk reader; 16 is LMCache's and vLLM's default order of magnitude, 4 our depth."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Of reading everything once."""

    seconds: float
    cpu_seconds: float
    blocked_seconds: float
    """Thread-seconds asleep in calls that read files."""
    waiting_seconds: float = 0.0
    """Thread-seconds asleep in those or in poll."""


def measure(context: Context) -> Measurement:
    """All three ratios.

    Raises:
        ForebayError: no fio, no storage daemon, no huge pages, no room.
    """
    total = QUICK_TOTAL if context.quick else TOTAL
    require_space(context.work, 2 * total + 64 * MIB)
    context.say("writing a file, and the same as chunks")
    file, chunks = _write(context.work, total)
    with reserved_huge_pages(96 * MIB), _drive(context.work, file) as (device, buffers):
        arms: dict[str, Callable[[], Cost]] = {
            "direct": partial(_fio, file, total),
            "vhost": partial(_vhost, device, buffers, total),
            **{f"files, {count} threads": partial(_files, chunks, count) for count in READERS},
        }
        found = interleave(arms, context.rounds, lambda arm: context.say(f"reading: {arm}"))
    return _report(found, total)


def _report(found: dict[str, list[Cost]], total: int) -> Measurement:
    def series(name: str, pick: Callable[[Cost], float], unit: str) -> Series:
        return Series.of([pick(one) for one in found[name]], unit)

    speed = {name: series(name, lambda one: total / one.seconds, "B/s") for name in found}
    cpu = {name: series(name, lambda one: one.cpu_seconds / total * 1e9, "s/GB") for name in found}
    waiting = {name: series(name, lambda one: one.waiting_seconds / total * 1e9, "s/GB") for name in found}
    blocked = {name: series(name, lambda one: one.blocked_seconds / total * 1e9, "s/GB") for name in found}
    files = max((name for name in found if name.startswith("files")), key=lambda name: speed[name].median)
    details: dict[str, Any] = {
        "bytes": total, "block_bytes": BLOCK, "depth": DEPTH, "file_per_chunk": files,
        "bandwidth": medians(speed), "cpu_per_gb": medians(cpu), "blocked_per_gb": medians(blocked),
        "waiting_per_gb": medians(waiting),
    }  # fmt: skip
    ratios = {
        "vhost_vs_direct_1m_qd4": speed["vhost"].median / speed["direct"].median,
        "client_cpu_per_gb_vs_file_per_chunk": cpu["vhost"].median / cpu[files].median,
        "blocked_vs_file_per_chunk": blocked["vhost"].median / blocked[files].median,
    }
    return Measurement(ratios, details)


def _write(work: Path, total: int) -> tuple[Path, list[Path]]:
    file, folder = work / "drive", work / "chunks"
    folder.mkdir()
    chunks = [folder / f"{number:06d}" for number in range(total // BLOCK)]
    noise = os.urandom(BLOCK)
    with file.open("wb") as whole:
        whole.write(bytes(superblock.SIZE))
        for number, path in enumerate(chunks):
            data = number.to_bytes(8, "little") + noise[8:]
            whole.write(data)
            path.write_bytes(data)
        whole.flush()
        os.fsync(whole.fileno())
    os.sync()
    return file, chunks


@contextmanager
def _drive(work: Path, file: Path) -> Iterator[tuple[Device, list[int]]]:
    """The file as a device, and buffers in the memory that is shared."""
    config = DeviceConfig.model_validate({"name": "drive", "kind": "spdk", "path": work / "socket", "depth": DEPTH})
    with StorageDaemon(file, work / "socket", aio="io_uring"):
        prepare_device(config, bytes(16))
        memory = host_memory([config], DEPTH * BLOCK)
        assert memory is not None
        with closing(memory), closing(open_device(config, pool_uuid=bytes(16), memory=memory)) as device:
            yield device, [memory.take(BLOCK) for _ in range(DEPTH)]


def _cost(work: Callable[[], None], watched: Sequence[int]) -> Cost:
    cpu = time.process_time()
    with BlockedSampler(watched) as blocked, BlockedSampler(watched, polls=True) as waiting:
        before = time.perf_counter()
        work()
        seconds = time.perf_counter() - before
    looking = blocked.own_cpu_seconds + waiting.own_cpu_seconds
    return Cost(seconds, time.process_time() - cpu - looking, blocked.seconds, waiting.seconds)


def _vhost(device: Device, buffers: Sequence[int], total: int) -> Cost:
    """Keeps `DEPTH` requests under way, as a pool's transfer does, and waits for the last."""
    count = total // BLOCK
    ops = [
        Op(number, Direction.READ, number * BLOCK, BLOCK, [(buffers[number % DEPTH], BLOCK)], False)
        for number in range(count)
    ]

    def work() -> None:
        left = count
        device.submit(ops)
        while left:
            select.select([device.fileno()], [], [])
            for done in device.poll():
                assert done.result == BLOCK, os.strerror(-done.result)
                left -= 1

    mine = {thread for thread in threads() if _name(thread) == f"kv-{device.name}"}
    return _cost(work, sorted(mine))


def _name(thread: int) -> str:
    try:
        return Path(f"/proc/self/task/{thread}/comm").read_text().strip()
    except OSError:
        return ""


def _fio(file: Path, total: int) -> Cost:
    done = fio_read(file, size=total, offset=superblock.SIZE, block=BLOCK, depth=DEPTH, huge_pages=True)
    return Cost(done.seconds, done.cpu_seconds, 0.0)


def _files(chunks: Sequence[Path], count: int) -> Cost:
    """Each thread reads whole files into a buffer of its own."""
    _forget(chunks)
    buffers = [bytearray(BLOCK) for _ in range(count)]

    def read(number: int) -> None:
        for path in chunks[number::count]:
            with open(path, "rb", buffering=0) as file:
                assert file.readinto(buffers[number]) == BLOCK

    with ThreadPoolExecutor(count) as pool:
        before = threads()
        list(pool.map(time.sleep, [0.05] * count))
        mine = sorted(threads() - before)
        return _cost(lambda: deque(pool.map(read, range(count)), 0).clear(), mine)


def _forget(chunks: Sequence[Path]) -> None:
    """Out of the page cache."""
    for path in chunks:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
