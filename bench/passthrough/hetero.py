"""A pool over unequal drives of both kinds: `hetero_spdk_vs_sum`.

Two drives behind storage daemons that throttle them, and one block device that the kernel throttles. The sum is that of
what each reaches alone, read through the same device for as many bytes as it holds of the load, in the same rounds.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from forebay.bench.fio import reserved_huge_pages
from forebay.bench.kv.session import BenchError, Memory2D, Session, keys
from forebay.bench.rig import throttled_devices, write_file
from forebay.bench.rounds import Series, interleave
from forebay.bench.storage_daemon import StorageDaemon, throttled
from forebay.bench.suite import Context, Measurement, medians
from forebay.bench.throttle import BURST_SECONDS
from forebay.storage.calibrate import calibrate
from forebay.storage.config import PoolConfig, load_config
from forebay.storage.device import superblock
from forebay.storage.device.base import Device, Direction, Op

MIB = 1 << 20
RATES = {"nvme0": 160e6, "nvme1": 80e6, "disk": 40e6}
"""Limits (bytes/s)."""
CHUNK, STRIPE, DEPTH = 3 * MIB, 512 << 10, 16
SECONDS = 1.95
"""Ideal length of a load: both kinds of throttle let the first tenth of a second's bytes pass at once, the kernel's in
slices, and what that is of the whole should not matter."""


def measure(context: Context) -> Measurement:
    """Its ratio.

    Raises:
        ForebayError: not root, no storage daemon, no huge pages, no loop devices or control groups.
    """
    total = sum(RATES.values())
    chunks = round(SECONDS * total / CHUNK)
    sizes = {name: int(chunks * CHUNK * rate / total * 1.5) // MIB * MIB + 16 * MIB for name, rate in RATES.items()}
    memory, names = Memory2D(chunks, CHUNK), keys("hetero", chunks)
    with _devices(context, sizes) as (pool, limit):
        context.say("calibrating")
        profile = calibrate(pool, seconds=0.75 if context.quick else 2.0, writes=False)
        limit(0)
        with Session(pool, memory) as session:
            context.say("storing")
            session.store(names)
            session.load(names, check=True)
            limit(RATES["disk"])
            shares = session.bytes_by_device(names)
            arms: dict[str, Callable[[], float]] = {"pool": partial(_load, session, names)}
            for device, share in zip(session.engine.devices, shares, strict=True):
                arms[device.name] = partial(_alone, device, memory, share)
            seconds = interleave(arms, max(2, context.rounds - 1), lambda arm: context.say(f"loading: {arm}"))
    series = {name: Series.of(values, "s") for name, values in seconds.items()}
    alone = {name: share / series[name].median for name, share in zip(RATES, shares, strict=True)}
    pooled = chunks * CHUNK / series["pool"].median
    details: dict[str, Any] = {
        "limits": {"values": RATES, "unit": "B/s"}, "bytes_by_device": dict(zip(RATES, shares, strict=True)),
        "alone": {"values": alone, "sum": sum(alone.values()), "unit": "B/s"}, "pool": {"value": pooled, "unit": "B/s"},
        "profile": {name: one.model_dump() for name, one in profile.devices.items()}, "seconds": medians(series),
    }  # fmt: skip
    return Measurement({"hetero_spdk_vs_sum": pooled / sum(alone.values())}, details)


@contextlib.contextmanager
def _devices(context: Context, sizes: dict[str, int]) -> Iterator[tuple[PoolConfig, Callable[[float], None]]]:
    """The pool over them, its throttled block device limited by what is called."""
    context.say("writing three drives")
    work = context.work
    with contextlib.ExitStack() as stack:
        rig = stack.enter_context(throttled_devices(work, [sizes["disk"]]))
        rig.set_rates([RATES["disk"]])
        stack.enter_context(reserved_huge_pages(96 * MIB))
        devices: list[dict[str, Any]] = []
        for name in ("nvme0", "nvme1"):
            file, socket = work / name, work / f"{name}.socket"
            write_file(file, sizes[name] + superblock.SIZE)
            stack.enter_context(StorageDaemon(file, socket, **throttled(RATES[name])))
            devices.append({"name": name, "kind": "spdk", "path": socket, "depth": DEPTH})
        devices.append({"name": "disk", "kind": "file", "path": rig.devices[0], "depth": DEPTH})
        pool = {"path": work / "pool", "stripe": STRIPE, "devices": devices, "verify": False}
        yield load_config(pool, env={}), lambda rate: rig.set_rates([rate])


def _load(session: Session, names: list[bytes]) -> float:
    """Seconds of a load from idle devices."""
    time.sleep(3 * BURST_SECONDS)
    return session.load(names).seconds


def _alone(device: Device, memory: Memory2D, size: int) -> float:
    """Seconds for as many bytes from one idle device."""
    time.sleep(3 * BURST_SECONDS)
    count = -(-size // STRIPE)
    room = memory.rows * memory.row_bytes // STRIPE
    ops = [
        Op(number, Direction.READ, number * STRIPE, STRIPE, [(memory.address + number % room * STRIPE, STRIPE)], False)
        for number in range(count)
    ]
    before, left = time.perf_counter(), count
    device.submit(ops)
    while left:
        select.select([device.fileno()], [], [])
        for done in device.poll():
            if done.result < 0:
                raise BenchError(f"{device.name} cannot be read: {os.strerror(-done.result)}")
            left -= 1
    return (time.perf_counter() - before) * size / (count * STRIPE)
