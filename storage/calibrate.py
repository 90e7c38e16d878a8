"""Measuring the devices of a pool: each alone, then all at once, and what one small read takes.

Together is what placement wants to know: a shared bus or memory controller shows only there. What is measured are
operations of the pool's stripe size, as many in flight as the device is configured for, on free slots that were
written a moment before: reads of extents that were never written are answered without asking the disk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from forebay.storage import journal, records
from forebay.storage.config import PoolConfig
from forebay.storage.device.base import Direction
from forebay.storage.errors import PoolError
from forebay.storage.lanes import open_lane
from forebay.storage.namespace import Namespace
from forebay.storage.opening import open_pool
from forebay.storage.profile import Profile
from forebay.storage.traffic import Bench, bandwidths, latency, prepare

SCRATCH_BYTES = 1 << 30
"""Most that is written to a device as something to read (bytes; our choice)."""
SHARED_BUS = 0.8
"""Below this ratio of together to alone the devices share something (our choice)."""

NAMESPACE = Namespace(model="calibration", weights="none")

Report = Callable[[str], None]
"""Told what is measured next."""


def calibrate(
    config: PoolConfig, *, seconds: float = 1.0, writes: bool = True, report: Report = lambda what: None
) -> Profile:
    """Measure all devices and store the profile beside the pool. Stored chunks stay as they are.

    Args:
        config: the pool, not in use by anyone else.
        seconds: per measurement.
        writes: measure writing as well.
        report: called `steps(config, writes)` times, each time before a measurement.

    Raises:
        PoolBusyError: an engine is using the pool.
        DeviceError, PoolError, ConfigError: a device cannot be used, or has not one free slot.
    """
    lanes = _lanes(config)
    opened = open_pool(config, NAMESPACE, lanes)
    try:
        opened.journal.close()
        engine = open_lane(config, 0, lanes)
        try:
            benches = [
                Bench(device, space.allocate(_scratch_slots(config, space.free)), config.stripe, depth.depth)
                for device, space, depth in zip(engine.devices, opened.spaces, config.devices, strict=True)
            ]
            _measure(benches, opened.profile, seconds, writes, report)
        finally:
            engine.close()
        _save(opened.profile, config)
    finally:
        opened.unlock()
    return opened.profile


def steps(config: PoolConfig, writes: bool = True) -> int:
    """How many measurements `calibrate` makes."""
    return (2 + writes) * len(config.devices) + 1 + writes


def shared(profile: Profile) -> float:
    """Sum of the read bandwidths together / alone: well below 1 where devices share a bus or a memory controller."""
    alone = sum(device.read_bandwidth for device in profile.devices.values())
    return sum(device.read_together for device in profile.devices.values()) / alone if alone else 1.0


def _lanes(config: PoolConfig) -> int:
    """Those that the pool was last opened with: with others its chunks would be lost."""
    found = records.replay(journal.read(config.journal_path), str(config.journal_path))
    return found.header.lanes if found else 1


def _scratch_slots(config: PoolConfig, free: int) -> int:
    return min(free, max(1, SCRATCH_BYTES // config.stripe))


def _save(profile: Profile, config: PoolConfig) -> None:
    try:
        profile.save(config.profile_path)
    except OSError as error:
        raise PoolError(
            f"profile {config.profile_path}: {error.strerror}; give `path` a folder that can be written"
        ) from None


def _measure(benches: Sequence[Bench], profile: Profile, seconds: float, writes: bool, report: Report) -> None:
    for bench in benches:
        found = profile.devices[bench.device.name]
        found.observed = 0.0
        if writes:
            report(f"{bench.device.name}: writing")
        prepare(bench, seconds / 2)
        if writes:
            found.write_bandwidth = bandwidths([bench], Direction.WRITE, seconds)[0]
        report(f"{bench.device.name}: reading")
        found.read_bandwidth = bandwidths([bench], Direction.READ, seconds)[0]
        report(f"{bench.device.name}: latency")
        found.latency = latency(bench)
    report("all devices: reading")
    for bench, bandwidth in zip(benches, bandwidths(benches, Direction.READ, seconds), strict=True):
        profile.devices[bench.device.name].read_together = bandwidth
    if writes:
        report("all devices: writing")
        for bench, bandwidth in zip(benches, bandwidths(benches, Direction.WRITE, seconds), strict=True):
            profile.devices[bench.device.name].write_together = bandwidth
