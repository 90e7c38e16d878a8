"""Measured, observed, stored."""

import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.storage.config import DeviceConfig
from forebay.storage.profile import ALPHA, CLAMP, DEFAULT_READ, FLOOR, DeviceProfile, Profile

DEVICES = [
    DeviceConfig(name="ram", kind="dram", size=1 << 20),
    DeviceConfig(name="ssd", kind="file", size=1 << 20, path="/x"),
]


def test_never_calibrated_is_assumed_by_kind(tmp_path):
    profile = Profile.load(tmp_path / "none", DEVICES)
    assert profile.weights() == [DEFAULT_READ["dram"], DEFAULT_READ["file"]]
    assert profile.latencies() == [0.0, 0.0]


def test_the_best_knowledge_wins():
    device = DeviceProfile(kind="file", read_bandwidth=3e9)
    assert device.weight == 3e9
    device.read_together = 2e9
    assert device.weight == 2e9
    device.observed = 1e9
    assert device.weight == 1e9


def test_saved_and_loaded(tmp_path):
    profile = Profile.load(tmp_path / "p.json", DEVICES)
    profile.devices["ssd"].read_together = 2.5e9
    profile.devices["ssd"].latency = 1e-4
    profile.observe("ram", 9e9)
    profile.save(tmp_path / "p.json")
    again = Profile.load(tmp_path / "p.json", DEVICES)
    assert again.devices == profile.devices
    assert again.latencies() == [0.0, 1e-4]
    assert [file.name for file in tmp_path.iterdir()] == ["p.json"]


def test_order_and_names_are_those_of_the_configuration(tmp_path):
    profile = Profile.load(tmp_path / "p.json", DEVICES)
    profile.devices["ssd"].read_bandwidth = 7e9
    profile.save(tmp_path / "p.json")
    again = Profile.load(tmp_path / "p.json", [DEVICES[1], DEVICES[1].model_copy(update={"name": "new"})])
    assert again.weights() == [7e9, DEFAULT_READ["file"]]


def test_a_device_of_another_kind_starts_anew(tmp_path):
    profile = Profile.load(tmp_path / "p.json", DEVICES)
    profile.devices["ssd"].read_bandwidth = 7e9
    profile.save(tmp_path / "p.json")
    ram = DEVICES[0].model_copy(update={"name": "ssd"})
    assert Profile.load(tmp_path / "p.json", [ram]).weights() == [DEFAULT_READ["dram"]]


@pytest.mark.parametrize("content", ["", "[]", '{"devices": {"ssd": {"kind": "file", "latency": -1}}}', "\x00"])
def test_a_damaged_file_counts_as_none(tmp_path, content, caplog):
    (tmp_path / "p.json").write_text(content)
    with caplog.at_level(logging.WARNING):
        profile = Profile.load(tmp_path / "p.json", DEVICES)
    assert profile.weights() == [8e9, 1.5e9]
    assert "run `forebay calibrate`" in caplog.text


def test_fields_of_a_newer_version_are_ignored(tmp_path):
    content = {"version": 2, "devices": {"ssd": {"kind": "file", "read_bandwidth": 2e9, "novelty": 1}}}
    (tmp_path / "p.json").write_text(json.dumps(content))
    assert Profile.load(tmp_path / "p.json", DEVICES).weights()[1] == 2e9


@given(st.lists(st.floats(min_value=-1e12, max_value=1e15) | st.just(float("nan")), max_size=30))
def test_one_observation_moves_the_estimate_by_little(observations):
    profile = Profile({"d": DeviceProfile(kind="file")})
    for observed in observations:
        before = profile.weights()[0]
        profile.observe("d", observed)
        after = profile.weights()[0]
        assert after >= FLOOR
        assert before * (1 - ALPHA * (1 - 1 / CLAMP)) - 1 <= after or after == FLOOR
        assert after <= max(FLOOR, before * (1 + ALPHA * (CLAMP - 1)) + 1)


def test_a_lasting_change_is_believed():
    profile = Profile({"d": DeviceProfile(kind="file", read_bandwidth=4e9)})
    for _ in range(80):
        profile.observe("d", 0.5e9)
    assert profile.weights()[0] == pytest.approx(0.5e9, rel=0.02)


def test_unknown_names_and_silence_change_nothing():
    profile = Profile({"d": DeviceProfile(kind="file")})
    profile.observe("x", 1e9)
    profile.observe("d", 0.0)
    assert profile.devices["d"].observed == 0.0
