"""Reading everything back that a pool holds, and comparing checksums."""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from forebay.storage import journal, records
from forebay.storage.config import PoolConfig
from forebay.storage.lanes import open_lane
from forebay.storage.maintenance.locked import locked
from forebay.storage.namespace import Namespace
from forebay.storage.plan import LoadPlan, Memory
from forebay.storage.pool import Pool
from forebay.storage.transfer import TransferEngine

BATCH = 64 << 20
"""Bytes read at once (our choice: fills the queue of any device)."""
PATIENCE = 300.0
"""Seconds to wait for a batch: a slow device is not a bad one (our choice)."""

GONE = "is recorded, but no longer where the record says"


@dataclass(frozen=True, slots=True)
class BadChunk:
    """A chunk that did not come back as it was stored."""

    model: str
    key: str
    """In hex."""
    reason: str


@dataclass(slots=True)
class VerifyReport:
    """What came back."""

    chunks: int = 0
    bytes: int = 0
    seconds: float = 0.0
    bad: list[BadChunk] = field(default_factory=list)
    dropped: int = 0
    """Bad chunks that the pool has now forgotten."""


Progress = Callable[[int, int], None]
"""Called with the bytes done so far and the bytes in all."""


def verify(config: PoolConfig, *, drop: bool = False, progress: Progress = lambda done, total: None) -> VerifyReport:
    """Read every chunk of every namespace and rank.

    Args:
        config: the pool.
        drop: forget what is bad. It would be a miss anyway, at the price of one failed load each.
        progress: is told how far it is.

    Raises:
        PoolBusyError: an engine uses the pool.
        JournalError, DeviceError, PoolError: it cannot be opened.
    """
    started = time.monotonic()
    with locked(config):
        found, sizes = _recorded(config)
    report = VerifyReport()
    if found is None:
        return report
    total = sum(size for keys in sizes.values() for size in keys.values()) * found.header.lanes
    for fingerprint, keys in sizes.items():
        namespace = _namespace(found.namespaces[fingerprint])
        with contextlib.closing(Pool.open(_patient(config), namespace, found.header.lanes)) as pool:
            _verify_namespace(pool, keys, report, drop=drop, progress=lambda done: progress(done, total))
    report.seconds = time.monotonic() - started
    return report


def _recorded(config: PoolConfig) -> tuple[records.Replay | None, dict[bytes, dict[bytes, int]]]:
    """The journal, and by namespace the length of every chunk on one rank."""
    data = journal.read(config.journal_path)
    found = records.replay(data, str(config.journal_path))
    sizes: defaultdict[bytes, dict[bytes, int]] = defaultdict(dict)
    for entry in records.decode(data, found) if found else ():
        fingerprint, key = entry.name[: records.FINGERPRINT], entry.name[records.FINGERPRINT :]
        sizes[fingerprint][key] = sum(span.length for span in entry.spans)
    return found, dict(sizes)


def _namespace(description: str) -> Namespace:
    fields = json.loads(description)
    return Namespace(**fields | {"groups": tuple(fields["groups"])})


def _patient(config: PoolConfig) -> PoolConfig:
    """The pool, every stripe of which is really tried: no quarantine, no hurry."""
    faults = config.faults.model_copy(update={"deadline": PATIENCE, "errors": 1 << 30})
    return config.model_copy(update={"faults": faults})


def _verify_namespace(
    pool: Pool, sizes: Mapping[bytes, int], report: VerifyReport, *, drop: bool, progress: Callable[[int], None]
) -> None:
    bad: dict[bytes, str] = {}
    with contextlib.closing(_Buffer(max(BATCH, *sizes.values()))) as buffer:
        for lane in range(pool.lanes):
            with contextlib.closing(open_lane(pool.config, lane, pool.lanes)) as engine:
                for keys in _batches(sizes):
                    bad |= {key: reason for key, reason in _read(pool, engine, keys, buffer).items() if key not in bad}
                    report.bytes += sum(sizes[key] for key in keys)
                    progress(report.bytes)
    report.chunks += len(sizes)
    report.bad += [BadChunk(pool.namespace.model, key.hex(), reason) for key, reason in bad.items()]
    if drop:
        pool.drop(bad)
        report.dropped += len(bad)


def _batches(sizes: Mapping[bytes, int]) -> Iterator[list[bytes]]:
    """Keys whose chunks amount to `BATCH` at most, or one key."""
    batch: list[bytes] = []
    room = BATCH
    for key, size in sizes.items():
        if batch and size > room:
            yield batch
            batch, room = [], BATCH
        batch.append(key)
        room -= size
    if batch:
        yield batch


def _read(pool: Pool, engine: TransferEngine, keys: list[bytes], buffer: _Buffer) -> dict[bytes, str]:
    """Load chunks with verification and return those that failed, with the reason."""
    plans = pool.prepare_load(keys)
    failed = dict.fromkeys(set(keys).difference(plan.key for plan in plans), GONE)
    for plan in plans:
        plan.verify = True
    engine.submit_load(0, buffer.assign(plans))
    for result in engine.wait([0]):
        failed |= result.failed
    pool.complete_load([plan.key for plan in plans])
    return failed


class _Buffer:
    """Memory to read into."""

    def __init__(self, size: int) -> None:
        self._memory = mmap.mmap(-1, size)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def assign(self, plans: Iterable[LoadPlan]) -> Iterator[tuple[LoadPlan, Memory]]:
        """Each plan with memory of its own."""
        address = self._address
        for plan in plans:
            length = sum(span.length for span in plan.spans)
            yield plan, [(address, length)]
            address += length

    def close(self) -> None:
        """Give the memory back."""
        self._memory.close()
