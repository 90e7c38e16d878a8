"""What a pool holds, read from its journal. An engine that uses the pool is not disturbed."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.storage import journal, records
from forebay.storage.config import PoolConfig
from forebay.storage.index import Entry
from forebay.storage.plan import NOWHERE, unpack
from forebay.storage.profile import Profile


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """One device, all ranks together."""

    name: str
    kind: str
    path: str
    capacity_bytes: int
    """0 as long as no engine has used it."""
    used_bytes: int
    """Of a `dram` device: what an engine that runs now has recorded there."""
    read_bandwidth: float
    """What placement assumes (bytes/s)."""
    calibrated: bool
    """Whether it was ever measured."""


@dataclass(frozen=True, slots=True)
class NamespaceReport:
    """What is stored for one model as one engine ran it."""

    fingerprint: str
    model: str
    chunks: int
    bytes: int
    description: dict[str, Any]
    """All that tells it apart from others."""


@dataclass(frozen=True, slots=True)
class PoolReport:
    """A pool as its journal describes it: what a restart would find."""

    path: str
    owner: int | None
    """Process that uses the pool now; 0 when it is on the other side of a container's border."""
    ranks: int
    devices: tuple[DeviceReport, ...]
    namespaces: tuple[NamespaceReport, ...]
    journal_bytes: int


def inspect(config: PoolConfig) -> PoolReport:
    """Read a pool's journal and profile. Changes nothing, and takes no lock.

    Raises:
        JournalError: the journal is not ours or damaged.
    """
    data = journal.read(config.journal_path)
    found = records.replay(data, str(config.journal_path))
    entries = records.decode(data, found) if found else []
    owner = owner_of(config.lock_path)
    return PoolReport(
        path=str(config.path),
        owner=owner,
        ranks=found.header.lanes if found else 0,
        devices=_devices(config, found, entries, running=owner is not None),
        namespaces=_namespaces(found, entries) if found else (),
        journal_bytes=len(data),
    )


def owner_of(lock: Path) -> int | None:
    """The process that holds the lock file `lock`, None when nobody does."""
    try:
        stat = lock.stat()
        locks = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    file = f"{os.major(stat.st_dev):02x}:{os.minor(stat.st_dev):02x}:{stat.st_ino}"
    holders = [line.split() for line in locks if " FLOCK " in line and "->" not in line]
    return next((max(0, int(fields[4])) for fields in holders if fields[5] == file), None)


def _devices(
    config: PoolConfig, found: records.Replay | None, entries: Iterable[Entry], *, running: bool
) -> tuple[DeviceReport, ...]:
    profile = Profile.load(config.profile_path, config.devices).devices
    slot = found.header.stripe * found.header.lanes if found else 0
    slots = {device.name: device.slots for device in found.header.devices} if found else {}
    used = _used(found, entries) if found else Counter()
    return tuple(
        DeviceReport(
            name=device.name,
            kind=device.kind,
            path=str(device.path or ""),
            capacity_bytes=slots.get(device.name, 0) * slot,
            used_bytes=used[device.name] * slot if running or device.kind != "dram" else 0,
            read_bandwidth=profile[device.name].weight,
            calibrated=profile[device.name].read_bandwidth > 0,
        )
        for device in config.devices
    )


def _used(found: records.Replay, entries: Iterable[Entry]) -> Counter[str]:
    """Slots in use by device name."""
    places = (place for entry in entries for place in unpack(entry.extents) + unpack(entry.copies))
    counts = Counter(place >> 32 for place in places if place != NOWHERE)
    return Counter({device.name: counts[number] for number, device in enumerate(found.header.devices)})


def _namespaces(found: records.Replay, entries: Iterable[Entry]) -> tuple[NamespaceReport, ...]:
    chunks, size = Counter[bytes](), Counter[bytes]()
    for entry in entries:
        fingerprint = entry.name[: records.FINGERPRINT]
        chunks[fingerprint] += 1
        size[fingerprint] += sum(span.length for span in entry.spans) * found.header.lanes
    reports = []
    for fingerprint, text in found.namespaces.items():
        description = json.loads(text)
        model = str(description.get("model", "?"))
        reports.append(NamespaceReport(fingerprint.hex(), model, chunks[fingerprint], size[fingerprint], description))
    return tuple(reports)
