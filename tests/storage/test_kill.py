"""kill -9 at any moment: everything that was published is found again, byte for byte, and nothing else is."""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forebay.storage.config import PoolConfig
from forebay.storage.lanes import open_lane
from forebay.storage.namespace import Namespace
from forebay.storage.pool import Lookup, Pool
from forebay.storage.transfer import TransferEngine

CHUNK = 300_000
KEYS = 400
"""More keys than the pool holds, so that evictions and reuse of slots go on all the time."""


def config(folder: Path) -> PoolConfig:
    devices = [
        {"name": "ram", "kind": "dram", "size": "8MiB", "huge_pages": False},
        {"name": "ssd0", "kind": "file", "size": "24MiB", "path": folder / "ssd0.kv", "buffered": True},
        {"name": "ssd1", "kind": "file", "size": "24MiB", "path": folder / "ssd1.kv", "buffered": True},
    ]
    return PoolConfig.model_validate({"path": folder / "state", "stripe": "64KiB", "devices": devices})


def namespace() -> Namespace:
    return Namespace(model="m", weights="w", dtype="bfloat16", layout="L", tokens_per_block=16, blocks_per_chunk=1)


def content(key: bytes, version: int) -> bytearray:
    """What chunk `key` holds: a function of its key, with the version of the store at the front."""
    body = random.Random(key).randbytes(CHUNK - 8)
    return bytearray(version.to_bytes(8, "little") + body)


def address(data: bytearray) -> list[tuple[int, int]]:
    return [(ctypes.addressof(ctypes.c_char.from_buffer(data)), len(data))]


def store(pool: Pool, engine: TransferEngine, keys: list[bytes], version: int) -> list[bytes]:
    """Store chunks; the keys that are acknowledged."""
    plans = pool.prepare_store(keys, (CHUNK,))
    data = {plan.key: content(plan.key, version) for plan in plans}
    engine.submit_store(version, [(plan, address(data[plan.key])) for plan in plans])
    (result,) = engine.wait([version])
    pool.complete_store({key: [lane] for key, lane in result.checksums.items()}, result.failed)
    return list(result.checksums)


def load_all(pool: Pool, engine: TransferEngine) -> dict[bytes, int]:
    """Load every chunk the pool knows, check every byte; the version of each."""
    keys = [key for key in map(key_of, range(KEYS)) if pool.lookup(key) is Lookup.READY]
    found: dict[bytes, int] = {}
    for number, key in enumerate(keys):
        (plan,) = pool.prepare_load([key])
        target = bytearray(CHUNK)
        engine.submit_load(1 << 40 | number, [(plan, address(target))])
        (result,) = engine.wait([1 << 40 | number])
        pool.complete_load([key], result.failed)
        assert not result.failed, f"{key!r} was published but cannot be read: {result.failed}"
        found[key] = int.from_bytes(target[:8], "little")
        assert target == content(key, found[key]), f"{key!r} came back with wrong bytes"
    return found


def key_of(index: int) -> bytes:
    return b"key-%04d" % index


def child(folder: Path) -> None:
    """Verify what is there, say so, then store and drop for ever."""
    pool = Pool.open(config(folder), namespace())
    engine = open_lane(config(folder))
    found = load_all(pool, engine)
    print(json.dumps({key.decode(): version for key, version in found.items()}), flush=True)
    dice = random.Random()
    version = time.monotonic_ns()
    while True:
        version += 1
        first = dice.randrange(KEYS - 5)
        done = store(pool, engine, [key_of(index) for index in range(first, first + dice.randrange(1, 6))], version)
        for key in done:
            print(f"stored {key.decode()} {version}", flush=True)
        if dice.random() < 0.2:
            gone = key_of(dice.randrange(KEYS))
            print(f"dropping {gone.decode()}", flush=True)
            pool.drop([gone])


def run_and_kill(folder: Path, seconds: float) -> tuple[dict[str, int], dict[str, int | None]]:
    """One life of the child: what it found at its start, and what it did to each key (version, or None: dropped)."""
    process = subprocess.Popen(
        [sys.executable, __file__, str(folder)], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": ""}
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "the child did not come up: what was there could not be verified"
    time.sleep(seconds)
    process.send_signal(signal.SIGKILL)
    output = process.stdout.read()
    process.wait()
    touched: dict[str, int | None] = {}
    for text in output.split("\n")[:-1]:
        words = text.split()
        touched[words[1]] = int(words[2]) if words[0] == "stored" else None
    return json.loads(line), touched


@pytest.mark.parametrize(
    "rounds",
    [pytest.param(10, id="quick"), pytest.param(100, id="long", marks=[pytest.mark.long, pytest.mark.timeout(1800)])],
)
def test_kill_9(tmp_path: Path, rounds: int) -> None:
    dice = random.Random(1)
    last: dict[str, int | None] = {}
    survivors = 0
    for _ in range(rounds):
        found, touched = run_and_kill(tmp_path, dice.uniform(0.02, 0.4))
        for key, version in found.items():
            assert key not in last or last[key] is None or version >= (last[key] or 0), (
                f"{key} is older than acknowledged"
            )
        survivors += len(found)
        last = touched
    assert survivors > 20 * rounds, "too little survives to prove anything"


if __name__ == "__main__":
    child(Path(sys.argv[1]))
