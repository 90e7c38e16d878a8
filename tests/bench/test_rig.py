"""The rig on the real kernel: loop devices that vanish by themselves, limits that hold."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forebay.bench import rig, throttle
from forebay.bench.fio import FioError, fio_read

MIB = 1 << 20

LEFT_BEHIND = """
import os, sys, time
from pathlib import Path
from forebay.bench.rig import throttled_devices
with throttled_devices(Path(sys.argv[1]), [1 << 20]) as rig:
    rig.set_rates([1e6])
    print(rig.devices[0], flush=True)
    time.sleep(60)
"""


def attached(device: Path) -> bool:
    return Path(f"/sys/block/{device.name}/loop").exists()


@pytest.mark.needs("root", "losetup", "fio")
def test_limits_hold_and_nothing_is_left(tmp_path: Path) -> None:
    before = Path("/proc/self/cgroup").read_text()
    with rig.throttled_devices(tmp_path, [8 * MIB, 8 * MIB]) as devices:
        devices.set_rates([20e6, 10e6])
        times = [fio_read(path, size=8 * MIB, block=256 << 10, depth=8).seconds for path in devices.devices]
        assert times[0] == pytest.approx(8 * MIB / 20e6, abs=throttle.BURST_SECONDS * 1.5)
        assert times[1] == pytest.approx(8 * MIB / 10e6, abs=throttle.BURST_SECONDS * 1.5)
        devices.set_rates([0, 0])
        assert fio_read(devices.devices[1], size=8 * MIB, block=256 << 10, depth=8).seconds < 0.4
    assert not any(map(attached, devices.devices))
    assert Path("/proc/self/cgroup").read_text() == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.needs("root", "losetup")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_run_leaves_no_devices(tmp_path: Path, number: int) -> None:
    process = subprocess.Popen([sys.executable, "-c", LEFT_BEHIND, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    device = Path(process.stdout.readline().strip())
    assert attached(device)
    process.send_signal(number)
    process.wait(10)
    deadline = time.monotonic() + 5
    while attached(device) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not attached(device)
    assert list(tmp_path.iterdir()) == []
    with throttle.Throttle():  # sweeps what was left
        pass
    assert not list(Path("/sys/fs/cgroup").glob(f"*/{throttle.PREFIX}{process.pid}"))


def test_too_little_space_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(rig.RigError, match="give --work a folder on a larger disk"):
        rig.require_space(tmp_path, 1 << 60)


def test_rates_are_scaled_down_together() -> None:
    assert rig.rates_for(10e9) == [400e6, 200e6, 100e6]
    assert rig.rates_for(700e6, part=0.5) == [200e6, 100e6, 50e6]


def test_written_files_have_every_block(tmp_path: Path) -> None:
    rig.write_file(tmp_path / "file", 5 * MIB)
    assert (tmp_path / "file").stat().st_size == 5 * MIB
    assert (tmp_path / "file").read_bytes()[-4096:].count(0) < 100


@pytest.mark.needs("fio")
def test_fio_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(FioError, match="fio failed"):
        fio_read(tmp_path / "missing", size=MIB, block=4096, depth=1)


def test_without_a_controller_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throttle.Path, "read_text", lambda self: "")
    with pytest.raises(throttle.ThrottleError, match="--only"):
        throttle.Throttle().__enter__()
