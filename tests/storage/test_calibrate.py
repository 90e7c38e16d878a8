"""Calibration on real devices: it measures what the kernel limits, and stored chunks survive it."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from forebay.bench.kv.session import NAMESPACE, Memory2D, Session, keys
from forebay.bench.rig import throttled_devices
from forebay.storage.calibrate import calibrate, shared, steps
from forebay.storage.config import PoolConfig, load_config
from forebay.storage.errors import DeviceError, PoolBusyError
from forebay.storage.pool import Pool
from forebay.storage.profile import DeviceProfile, Profile

MIB = 1 << 20


def config(folder: Path, **changes: object) -> PoolConfig:
    devices = [
        {"name": "ssd", "kind": "file", "path": folder / "ssd.kv", "size": "8MiB", "depth": 8},
        {"name": "ram", "kind": "dram", "size": "8MiB", "depth": 8},
    ]
    return load_config({"path": folder / "pool", "stripe": "256KiB", "devices": devices, **changes}, env={})


def test_every_device_is_measured_and_the_profile_stored(tmp_path: Path) -> None:
    pool = config(tmp_path)
    heard: list[str] = []
    profile = calibrate(pool, seconds=0.05, report=heard.append)
    assert len(heard) == steps(pool)
    for device in profile.devices.values():
        assert min(device.read_bandwidth, device.write_bandwidth, device.read_together, device.write_together) > 1e6
        assert 0 < device.latency < 0.1
    stored = json.loads(pool.profile_path.read_text())
    assert set(stored["devices"]) == {"ssd", "ram"}
    assert Profile.load(pool.profile_path, pool.devices).weights() == profile.weights()


def test_stored_chunks_survive(tmp_path: Path) -> None:
    pool = config(tmp_path)
    memory = Memory2D(6, 1 * MIB)
    names = keys("kept", memory.rows)
    with Session(pool, memory) as session:
        session.store(names)
    calibrate(pool, seconds=0.05)
    with Session(pool, memory) as session:
        session.load(names, check=True)


def test_chunks_of_several_ranks_survive(tmp_path: Path) -> None:
    pool = config(tmp_path)
    Pool.open(pool, NAMESPACE, lanes=2).close()
    calibrate(pool, seconds=0.02, writes=False)
    opened = Pool.open(pool, NAMESPACE, lanes=2)
    assert opened.lanes == 2
    opened.close()


def test_what_was_observed_before_is_forgotten(tmp_path: Path) -> None:
    pool = config(tmp_path)
    pool.path.mkdir()
    Profile({"ssd": DeviceProfile(kind="file", observed=123e6)}).save(pool.profile_path)
    profile = calibrate(pool, seconds=0.02)
    assert profile.devices["ssd"].observed == 0
    assert profile.devices["ssd"].weight == profile.devices["ssd"].read_together


def test_a_pool_in_use_is_left_alone(tmp_path: Path) -> None:
    pool = config(tmp_path)
    with Session(pool, Memory2D(1, MIB)), pytest.raises(PoolBusyError, match="in use"):
        calibrate(pool)


def test_a_full_device_is_one_line(tmp_path: Path) -> None:
    pool = config(tmp_path, durable=False, watermarks={"high": 1.0, "low": 1.0})
    memory = Memory2D(64, 256 << 10)
    with Session(pool, memory) as session:
        session.store(keys("full", memory.rows))
    profile = pool.path / "profile.json"
    profile.unlink()
    # What lay in memory is gone after the restart, what lies on the SSD fills it.
    with Session(pool.model_copy(update={"devices": pool.devices[:1]}), memory) as session:
        session.pool.reset()
        session.store(keys("full again", 32))
    with pytest.raises(DeviceError, match="'ssd': not one slot is free"):
        calibrate(pool, seconds=0.02)


@pytest.mark.needs("root", "losetup")
def test_limits_of_the_kernel_are_found(tmp_path: Path) -> None:
    with throttled_devices(tmp_path, [32 * MIB, 32 * MIB]) as rig:
        rig.set_rates([40e6, 20e6])
        devices = [{"name": path.name, "kind": "file", "path": path} for path in rig.devices]
        pool = load_config({"path": tmp_path / "pool", "devices": devices}, env={})
        profile = calibrate(pool, seconds=0.5, writes=False)
        fast, slow = profile.devices.values()
    assert fast.read_together == pytest.approx(40e6, rel=0.35)
    assert slow.read_bandwidth == pytest.approx(20e6, rel=0.35)
    assert fast.weight / slow.weight == pytest.approx(2, rel=0.2)
    assert shared(profile) > 0.7


def test_a_shared_bus_shows() -> None:
    halves = {name: DeviceProfile(kind="file", read_bandwidth=2e9, read_together=1e9) for name in ("a", "b")}
    assert shared(Profile(halves)) == 0.5


def test_a_pool_that_was_never_measured_shares_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert shared(Profile({"a": DeviceProfile(kind="file")})) == 1.0
