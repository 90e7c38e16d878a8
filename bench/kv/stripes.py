"""Striping over three unequal devices: `stripe_vs_sum`, `stripe_vs_equal`, `stripe_vs_hash`, `any_prefix_balance`.

The devices are loop devices that the kernel throttles to about 4:2:1. Placement goes by our own calibration of them,
made in the same run, not by the configured limits. The same chunks are stored three times on the same devices, once
with each placement, and loaded from there.

The kernel hands out reads in slices of 0.1 s, a whole slice's bytes at its beginning, so a load of 0.65 s is seen as
one of 0.6 s. The same holds for fio if it starts on an idle device and reads as many bytes from it as the load did:
that is what "alone" means here, and a pause precedes every measurement. The lengths of the loads are such that their
ideal falls into the middle of a slice: at its edge a hair's breadth of imbalance would count as a whole slice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from forebay.bench.fio import fio_read
from forebay.bench.kv.session import Memory2D, Session, keys
from forebay.bench.rig import Rig, probe_disk, rates_for, throttled_devices
from forebay.bench.rounds import Series, interleave
from forebay.bench.suite import Context, Measurement, medians
from forebay.bench.throttle import BURST_SECONDS
from forebay.storage.calibrate import calibrate
from forebay.storage.config import PoolConfig, load_config
from forebay.storage.units import format_rate

MIB = 1 << 20
PLACEMENTS = ("bandwidth", "equal", "hash")
PLACEMENT_RATIOS = frozenset({"stripe_vs_sum", "stripe_vs_equal", "stripe_vs_hash"})
STRIPE = 512 << 10
DEPTH = 32
CHUNK = 3 * MIB
RATES = (160e6, 80e6, 40e6)
"""Limits of the devices (bytes/s) where the disk is fast enough."""
SECONDS, QUICK_SECONDS = 1.95, 0.65
"""Ideal length of a load of all chunks."""
LONG_RATES = (89e6, 44.5e6, 22.25e6)
SECONDS_PER_LONG_CHUNK = 0.08125
"""Of the chunks of `any_prefix_balance`, about 12 MiB: the shortest prefix takes well above a slice."""
PREFIXES, QUICK_PREFIXES = (8, 9, 10, 14, 18, 24, 28), (8, 10)


@dataclass(frozen=True)
class Plan:
    """How much is stored, for how long."""

    rates: tuple[float, ...]
    long_rates: tuple[float, ...]
    chunks: int
    long_chunk: int
    prefixes: tuple[int, ...]

    @classmethod
    def make(cls, quick: bool, disk: float = 1e12) -> Plan:
        """For a disk that reads so fast (bytes/s)."""
        rates, long_rates = rates_for(disk, RATES), rates_for(disk, LONG_RATES)
        return cls(
            rates=tuple(rates),
            long_rates=tuple(long_rates),
            chunks=round((QUICK_SECONDS if quick else SECONDS) * sum(rates) / CHUNK),
            long_chunk=max(1, round(SECONDS_PER_LONG_CHUNK * sum(long_rates) / STRIPE)) * STRIPE,
            prefixes=QUICK_PREFIXES if quick else PREFIXES,
        )

    def sizes(self) -> list[int]:
        """Bytes that each device needs: its share by bandwidth, a third of `equal`, and up to half of `hash`."""
        total, long_total = self.chunks * CHUNK, max(self.prefixes) * self.long_chunk
        shares = [rate / sum(self.rates) for rate in self.rates]
        needed = [total * (share + 1 / 3 + 1 / 2) + long_total * share for share in shares]
        return [int(size * 1.1) // MIB * MIB + 16 * MIB for size in needed]


def measure(context: Context) -> Measurement:
    """All four ratios, or those wanted, on one set of devices."""
    context.say("writing three devices")
    with throttled_devices(context.work, Plan.make(context.quick).sizes()) as rig:
        disk = probe_disk(rig.devices[0], 128 * MIB)
        plan = Plan.make(context.quick, disk)
        config = _config(context.work, rig)
        found = Measurement(details={"disk": {"read_bandwidth": disk, "unit": "B/s"}})
        context.say(f"calibrating devices limited to {', '.join(map(format_rate, plan.rates))}")
        rig.set_rates(plan.rates)
        found.details["profile"] = _calibrate(config, 0.75 if context.quick else 2.0)
        if context.wanted & PLACEMENT_RATIOS:
            _placements(context, rig, config, plan, found)
        if "any_prefix_balance" in context.wanted:
            _prefixes(context, rig, config, plan, found)
        return found


def _config(work: Path, rig: Rig) -> PoolConfig:
    devices = [{"name": path.name, "kind": "file", "path": path, "depth": DEPTH} for path in rig.devices]
    return load_config({"path": work / "pool", "stripe": STRIPE, "devices": devices, "verify": False}, env={})


def _calibrate(config: PoolConfig, seconds: float) -> dict[str, Any]:
    profile = calibrate(config, seconds=seconds, writes=False)
    return {name: device.model_dump() for name, device in profile.devices.items()}


def _placements(context: Context, rig: Rig, config: PoolConfig, plan: Plan, found: Measurement) -> None:
    context.say("storing with each placement")
    rig.set_rates([0, 0, 0])
    memory = Memory2D(plan.chunks, CHUNK)
    names = {placement: keys(placement, plan.chunks) for placement in PLACEMENTS}
    for placement in PLACEMENTS:
        with Session(config.model_copy(update={"placement": placement}), memory) as session:
            session.store(names[placement])
    with Session(config, memory) as session:
        for placement in PLACEMENTS:
            session.load(names[placement], check=True)
        bytes_by_device = {placement: session.bytes_by_device(names[placement]) for placement in PLACEMENTS}
        shares = bytes_by_device["bandwidth"]
        rig.set_rates(plan.rates)
        arms: dict[str, Callable[[], float]] = {name: partial(_load, session, names[name]) for name in PLACEMENTS}
        arms |= _alone_arms(rig, shares)
        seconds = interleave(arms, max(2, context.rounds - 1), lambda arm: context.say(f"loading: {arm}"))
    series = {name: Series.of(values, "s") for name, values in seconds.items()}
    alone = [share / series[f"alone {path.name}"].median for path, share in zip(rig.devices, shares, strict=True)]
    striped = plan.chunks * CHUNK / series["bandwidth"].median
    found.ratios["stripe_vs_sum"] = striped / sum(alone)
    for other in ("equal", "hash"):
        found.ratios[f"stripe_vs_{other}"] = series[other].median / series["bandwidth"].median
    found.details["placements"] = _setting(plan.rates, CHUNK) | {
        "chunks": plan.chunks,
        "alone": {"values": alone, "sum": sum(alone), "unit": "B/s"},
        "striped": {"value": striped, "unit": "B/s"},
        "bytes_by_device": bytes_by_device,
        "seconds": medians(series),
    }


def _prefixes(context: Context, rig: Rig, config: PoolConfig, plan: Plan, found: Measurement) -> None:
    context.say("storing chunks for the prefixes")
    rig.set_rates([0, 0, 0])
    names = keys("prefix", max(plan.prefixes))
    memory = Memory2D(len(names), plan.long_chunk)
    with Session(config, memory) as session:
        session.store(names)
        session.load(names, check=True)
        rig.set_rates(plan.long_rates)
        arms = {str(length): partial(_load, session, names[:length]) for length in plan.prefixes}
        rounds = max(1, context.rounds - 1)
        seconds = interleave(arms, rounds, lambda arm: context.say(f"loading a prefix of {arm} chunks"))
        shares = {length: session.bytes_by_device(names[:length]) for length in plan.prefixes}
    rows: dict[str, Any] = {}
    for length in plan.prefixes:
        context.say(f"ideal time of {length} chunks")
        alone = [
            share / arm() for share, arm in zip(shares[length], _alone_arms(rig, shares[length]).values(), strict=True)
        ]
        ideal = length * plan.long_chunk / sum(alone)
        series = Series.of(seconds[str(length)], "s")
        rows[str(length)] = {
            "ratio": series.median / ideal,
            "ideal": {"value": ideal, "unit": "s"},
            "seconds": series.to_json(),
            "bytes_by_device": shares[length],
            "alone": {"values": alone, "unit": "B/s"},
        }
    found.ratios["any_prefix_balance"] = max(row["ratio"] for row in rows.values())
    found.details["prefixes"] = _setting(plan.long_rates, plan.long_chunk) | {"by_length": rows}


def _setting(rates: Sequence[float], chunk: int) -> dict[str, Any]:
    limits = {"values": list(rates), "unit": "B/s"}
    return {"chunk_bytes": chunk, "stripe_bytes": STRIPE, "depth": DEPTH, "limits": limits}


def _load(session: Session, names: Sequence[bytes]) -> float:
    """Seconds of a load from idle devices."""
    time.sleep(3 * BURST_SECONDS)
    return session.load(names).seconds


def _alone_arms(rig: Rig, shares: Sequence[int]) -> dict[str, Callable[[], float]]:
    """By device: seconds that fio needs for as many bytes; its start-up is pause enough."""
    return {f"alone {path.name}": partial(_fio, path, share) for path, share in zip(rig.devices, shares, strict=True)}


def _fio(path: Path, size: int) -> float:
    return fio_read(path, size=size, block=STRIPE, depth=DEPTH).seconds
