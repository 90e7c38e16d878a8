"""Small pools to play with: 4 KiB stripes, real files, checksums made up from the keys."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path

from forebay.storage.config import PoolConfig
from forebay.storage.index import Entry
from forebay.storage.namespace import Namespace
from forebay.storage.plan import NOWHERE, LoadPlan, StorePlan, unpack
from forebay.storage.pool import Pool

STRIPE = 4096
NAMESPACE = Namespace(model="m", weights="w")


def checksums(key: bytes, stripes: int, lanes: int = 1) -> list[list[int]]:
    """What the lanes of a chunk would report."""
    return [[zlib.crc32(key, 1000 * lane + stripe) for stripe in range(stripes)] for lane in range(lanes)]


class Pools:
    """Opens pools in one folder and closes what is left open."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: list[Pool] = []

    def config(self, ram: int = 0, ssds: Sequence[int] = (), **changes: object) -> PoolConfig:
        """A pool with a `dram` device of `ram` slots, if any, and a `file` for each of `ssds`, by slots."""
        devices: list[dict[str, object]] = [{"name": "ram", "kind": "dram", "size": ram * STRIPE}] if ram else []
        devices += [
            {
                "name": f"ssd{i}",
                "kind": "file",
                "size": slots * STRIPE,
                "path": self.folder / f"ssd{i}",
                "buffered": True,
            }
            for i, slots in enumerate(ssds)
        ]
        fields = {"path": self.folder / "pool", "stripe": STRIPE, "devices": devices, **changes}
        return PoolConfig.model_validate(fields)

    def open(self, config: PoolConfig, namespace: Namespace = NAMESPACE, lanes: int = 1) -> Pool:
        """An open pool; closed at the end of the test at the latest."""
        pool = Pool.open(config, namespace, lanes)
        self._open.append(pool)
        return pool

    def crash(self, pool: Pool) -> None:
        """What a kill -9 leaves: nothing more is written, the lock is free."""
        pool._journal._halt()
        pool._opened.unlock()
        pool._closed = True

    def close(self) -> None:
        """Close every pool."""
        for pool in self._open:
            pool.close()


def keys_of(prefix: str, count: int) -> list[bytes]:
    """A chain of keys."""
    return [b"%s-%04d" % (prefix.encode(), i) for i in range(count)]


def finish(pool: Pool, plans: Sequence[StorePlan]) -> list[bytes]:
    """Complete stores as the workers would. Returns the keys."""
    pool.complete_store({plan.key: checksums(plan.key, len(plan.spans), pool.lanes) for plan in plans})
    return [plan.key for plan in plans]


def store(pool: Pool, keys: Sequence[bytes], stripes: int = 1) -> list[bytes]:
    """Store chunks of so many full stripes. Returns the keys that fitted."""
    return finish(pool, pool.prepare_store(keys, [stripes * STRIPE]))


def load(pool: Pool, keys: Sequence[bytes]) -> list[LoadPlan]:
    """Load chunks and complete at once. Returns the plans."""
    plans = pool.prepare_load(keys)
    pool.complete_load([plan.key for plan in plans])
    return plans


def check_slots(pool: Pool) -> None:
    """No slot belongs to two chunks, no device holds more than it has, and the counts agree."""
    places = [place for entry in pool._index for place in places_of(entry)]
    assert len(set(places)) == len(places)
    for device, space in enumerate(pool._index.spaces):
        assert sum(place >> 32 == device for place in places) <= space.used <= space.capacity


def places_of(entry: Entry) -> list[int]:
    """All slots of a chunk, copies included, as `device << 32 | slot`."""
    return [place for place in unpack(entry.extents) + unpack(entry.copies) if place != NOWHERE]
