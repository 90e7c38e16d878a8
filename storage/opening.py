"""Opening a pool: the lock, the devices, and what the journal says about them."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import logging
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from forebay.storage import journal as journals
from forebay.storage import records
from forebay.storage.config import PoolConfig
from forebay.storage.device import capacity_of
from forebay.storage.errors import ConfigError, PoolBusyError, PoolError
from forebay.storage.index import Entry
from forebay.storage.lanes import pool_uuid
from forebay.storage.namespace import Namespace
from forebay.storage.plan import lane_slots
from forebay.storage.profile import Profile
from forebay.storage.recovery import IN_MEMORY, Recovered, recover
from forebay.storage.space import Space
from forebay.storage.units import format_bytes

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Opened:
    """What `Pool` starts from."""

    header: records.Header
    profile: Profile
    journal: journals.Journal
    spaces: list[Space]
    entries: list[Entry]
    """Recovered chunks, coldest first."""
    namespaces: dict[bytes, str]
    lost: int
    """Chunks that were not recovered."""
    last_generation: int
    seconds: float
    """How long recovery took."""
    lock: int

    def content(self, entries: Iterable[Entry]) -> Iterator[bytes]:
        """The records of a fresh journal that holds `entries`."""
        yield records.header_record(self.header)
        yield from (records.namespace_record(*item) for item in self.namespaces.items())
        yield from map(records.put_record, entries)

    def unlock(self) -> None:
        """Let others open the pool."""
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1


def open_pool(config: PoolConfig, namespace: Namespace, lanes: int) -> Opened:
    """Lock the pool, prepare its devices and recover its index. Raises as `Pool.open` says."""
    lock = lock_pool(config)
    try:
        header = _header(config, lanes)
        started = time.monotonic()
        with no_collections():
            opened = _recover(config, header, namespace, lock)
        opened.seconds = time.monotonic() - started
        _advise(config, header)
        return opened
    except BaseException:
        os.close(lock)
        raise


def lock_pool(config: PoolConfig) -> int:
    """The open lock file, locked, with our process id in it; closing it lets others open the pool.

    Raises:
        PoolBusyError: another process has it open.
        PoolError: the folder cannot be written.
    """
    try:
        config.path.mkdir(parents=True, exist_ok=True)
        lock = os.open(config.lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise PoolError(f"pool folder {config.path}: {error.strerror}; `path` must be a writable folder") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        owner = os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(lock)
        raise PoolBusyError(
            f"pool {config.path} is in use by process {owner}; stop it, or give this one another `path`"
        ) from None
    with contextlib.suppress(OSError):
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock


def _header(config: PoolConfig, lanes: int) -> records.Header:
    """The devices as they are now."""
    identity = pool_uuid(config)
    devices = []
    for device in config.devices:
        capacity = capacity_of(device, identity)
        slots = lane_slots(capacity, lanes, config.stripe)
        if slots == 0:
            raise ConfigError(
                f"device {device.name!r} has {format_bytes(capacity)} for {lanes} ranks, less than one stripe "
                f"({format_bytes(config.stripe)}) each; make it larger"
            )
        devices.append(records.DeviceRecord(device.name, device.kind, str(device.path or ""), slots))
    return records.Header(identity, config.stripe, lanes, tuple(devices))


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Hundreds of thousands of entries come to stay: looking for garbage among them doubles the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _recover(config: PoolConfig, header: records.Header, namespace: Namespace, lock: int) -> Opened:
    data = journals.read(config.journal_path)
    found = records.replay(data, str(config.journal_path))
    entries = records.decode(data, found) if found else []
    kept = recover(entries, found.header if found else header, header)
    _report(config.path, kept)
    opened = Opened(
        header=header,
        profile=Profile.load(config.profile_path, config.devices),
        journal=journals.Journal(config.journal_path),
        spaces=[Space(device.slots, used) for device, used in zip(header.devices, kept.used, strict=True)],
        entries=_coldest_first(kept.entries, namespace.fingerprint),
        namespaces=dict(found.namespaces) if found else {},
        lost=len(kept.lost),
        last_generation=found.last_generation if found else 0,
        seconds=0.0,
        lock=lock,
    )
    _start_journal(opened, found, kept, namespace)
    return opened


def _start_journal(opened: Opened, found: records.Replay | None, kept: Recovered, namespace: Namespace) -> None:
    """Go on with the journal where its places still mean the same, else begin a new one with what was kept."""
    known = namespace.fingerprint in opened.namespaces
    opened.namespaces[namespace.fingerprint] = namespace.describe()
    if found is None or found.header != opened.header:
        opened.journal.rewrite(opened.content(opened.entries))
        return
    opened.journal.resume(found)
    if not known:
        opened.journal.append(records.namespace_record(namespace.fingerprint, namespace.describe()))
    if kept.lost:
        freed = sum([records.put_size(entry) for entry in kept.lost])
        opened.journal.append(records.drop_record([entry.generation for entry in kept.lost]), -freed)
    opened.journal.write()


def _coldest_first(entries: list[Entry], fingerprint: bytes) -> list[Entry]:
    """Other namespaces' chunks before ours, each from old to new."""
    return sorted(entries, key=lambda entry: entry.name.startswith(fingerprint))


def _advise(config: PoolConfig, header: records.Header) -> None:
    """Say so when a durable pool leaves memory idle."""
    memory, persistent = 0, 0
    for device in header.devices:
        size = device.slots * config.stripe * header.lanes
        memory, persistent = memory + size * (device.kind == "dram"), persistent + size * (device.kind != "dram")
    if config.durable and 0 < persistent < memory:
        logger.warning(
            "pool %s: a durable pool holds what fits on its persistent devices (%s), less than its memory (%s); "
            "enlarge them, or set `durable: false` to use all of both",
            config.path,
            format_bytes(persistent),
            format_bytes(memory),
        )


def _report(path: Path, kept: Recovered) -> None:
    for reason, count in kept.reasons.items():
        if reason != IN_MEMORY and count:
            logger.warning("pool %s: %d stored chunks are dropped: %s", path, count, reason)
