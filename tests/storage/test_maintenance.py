"""A pool at rest: made, looked into, checked and emptied."""

from __future__ import annotations

import contextlib
import ctypes
import os

import pytest

from forebay.storage.config import load_config
from forebay.storage.errors import DeviceError, PoolBusyError
from forebay.storage.lanes import open_lane
from forebay.storage.maintenance.clear import clear
from forebay.storage.maintenance.create import create, plan
from forebay.storage.maintenance.inspect import inspect
from forebay.storage.maintenance.verify import GONE, verify
from forebay.storage.namespace import Namespace
from forebay.storage.pool import Pool

CHUNK = 200_000
"""Bytes on one rank: four stripes, the last one short."""


@pytest.fixture
def config(tmp_path):
    devices = [
        {"name": "ram0", "kind": "dram", "size": "4MiB"},
        {"name": "ssd0", "kind": "file", "size": "8MiB", "path": str(tmp_path / "ssd0.kv")},
        {"name": "ssd1", "kind": "file", "size": "8MiB", "path": str(tmp_path / "ssd1.kv")},
    ]
    return load_config({"path": str(tmp_path / "state"), "stripe": "64KiB", "devices": devices}, env={})


def namespace(model):
    return Namespace(model=model, weights=f"content:{model}", dtype="bfloat16", groups=("0:16:a,b",))


def fill(config, model, count, lanes=1):
    """Store `count` random chunks as an engine would."""
    keys = [f"{model}-{number}".encode() for number in range(count)]
    with contextlib.closing(Pool.open(config, namespace(model), lanes)) as pool:
        plans = pool.prepare_store(keys, [CHUNK])
        assert len(plans) == count
        checksums = {key: [] for key in keys}
        for lane in range(lanes):
            with contextlib.closing(open_lane(config, lane, lanes)) as engine:
                memory = [ctypes.create_string_buffer(os.urandom(CHUNK), CHUNK) for _ in keys]
                pieces = [[(ctypes.addressof(buffer), CHUNK)] for buffer in memory]
                engine.submit_store(1, zip(plans, pieces))
                (result,) = engine.wait()
                assert not result.failed
                for key, stripes in result.checksums.items():
                    checksums[key].append(stripes)
        pool.complete_store(checksums)


def corrupt(config, device, start, length):
    """Overwrite bytes behind the label of a file device."""
    with open(config.devices[device].path, "r+b") as file:
        file.seek(4096 + start)
        file.write(os.urandom(length))


# ---- create ----


def test_plan_changes_nothing(config, tmp_path):
    devices = plan(config)
    assert [(device.size, device.fits) for device in devices] == [(4 << 20, True), (8 << 20, True), (8 << 20, True)]
    assert devices[1].allocate == (8 << 20) + 4096
    assert list(tmp_path.iterdir()) == []


def test_create_allocates_and_again_is_harmless(config):
    first = create(config)
    assert [device.allocate for device in first] == [0, 0, 0]
    assert config.devices[1].path.stat().st_blocks * 512 >= 8 << 20
    fill(config, "m", 3)
    create(config)
    assert inspect(config).namespaces[0].chunks == 3


def test_plan_sees_too_little_room(config):
    devices = list(config.model_copy().devices)
    devices[1] = devices[1].model_copy(update={"size": 1 << 50})
    assert [device.fits for device in plan(config.model_copy(update={"devices": tuple(devices)}))] == [
        True,
        False,
        True,
    ]


def test_missing_folder_names_the_fix(config, tmp_path):
    devices = (config.devices[1].model_copy(update={"path": tmp_path / "absent" / "ssd.kv"}),)
    with pytest.raises(DeviceError, match=r"device 'ssd0': .*absent.*No such file.*; create the folder"):
        plan(config.model_copy(update={"devices": devices}))


# ---- inspect ----


def test_inspect_of_nothing(config, tmp_path):
    report = inspect(config)
    assert (report.owner, report.namespaces, report.journal_bytes) == (None, (), 0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("lanes", [1, 2])
def test_inspect_counts_chunks_and_bytes(config, lanes):
    fill(config, "a", 3, lanes)
    fill(config, "b", 2, lanes)
    report = inspect(config)
    assert [(n.model, n.chunks, n.bytes) for n in report.namespaces] == [
        ("a", 3, 3 * CHUNK * lanes),
        ("b", 2, 2 * CHUNK * lanes),
    ]
    stripes = 5 * 4
    on_disk = sum(device.used_bytes for device in report.devices[1:])
    assert on_disk == stripes * (64 << 10) * lanes  # every stripe, or its copy, is on a file
    assert report.ranks == lanes
    assert report.devices[0].used_bytes == 0  # memory holds nothing once the engine has stopped


def test_inspect_does_not_disturb_a_running_engine(config):
    with contextlib.closing(Pool.open(config, namespace("m"))):
        assert inspect(config).owner == os.getpid()
    assert inspect(config).owner is None


# ---- verify ----


@pytest.mark.parametrize("lanes", [1, 2])
def test_all_is_well(config, lanes):
    fill(config, "a", 5, lanes)
    fill(config, "b", 4, lanes)
    seen = []
    report = verify(config, progress=lambda done, total: seen.append((done, total)))
    assert (report.chunks, report.bytes, report.bad) == (9, 9 * CHUNK * lanes, [])
    assert seen[-1] == (report.bytes, report.bytes)


def test_verify_of_nothing(config):
    assert verify(config).chunks == 0


@pytest.mark.parametrize("lanes", [1, 2])
def test_every_flipped_byte_is_found_and_dropped(config, lanes):
    fill(config, "a", 6, lanes)
    corrupt(config, 1, 0, 8 << 20)
    report = verify(config)
    assert 0 < len(report.bad) <= 6
    assert all(chunk.model == "a" and "checksum" in chunk.reason for chunk in report.bad)
    assert verify(config).bad == report.bad  # without drop nothing has changed
    assert verify(config, drop=True).dropped == len(report.bad)
    after = verify(config)
    assert (after.chunks, after.bad) == (6 - len(report.bad), [])


def test_damage_in_one_stripe_costs_one_chunk(config):
    fill(config, "a", 6)
    corrupt(config, 2, 100, 1)
    assert len(verify(config).bad) == 1


def test_small_batches_give_the_same(config, monkeypatch):
    fill(config, "a", 6)
    monkeypatch.setattr("forebay.storage.maintenance.verify.BATCH", 1)
    assert verify(config).bytes == 6 * CHUNK


def test_device_that_left_the_configuration(config):
    fill(config, "a", 4)
    report = verify(config.model_copy(update={"devices": config.devices[:2]}))
    assert {chunk.reason for chunk in report.bad} == {GONE}


def test_nobody_verifies_or_clears_under_a_running_engine(config):
    fill(config, "a", 1)
    with contextlib.closing(Pool.open(config, namespace("m"))):
        for tool in (verify, clear, create):
            with pytest.raises(PoolBusyError, match=str(os.getpid())):
                tool(config)
    assert verify(config).chunks == 1


# ---- clear ----


def test_clear_forgets_and_keeps_the_space(config):
    fill(config, "a", 3)
    assert clear(config) == [config.journal_path]
    assert verify(config).chunks == 0
    assert config.devices[1].path.stat().st_blocks * 512 >= 8 << 20
    fill(config, "a", 3)


def test_delete_leaves_nothing(config, tmp_path):
    fill(config, "a", 3)
    clear(config, delete=True)
    assert list(tmp_path.iterdir()) == []


def test_delete_spares_what_is_not_ours(config):
    fill(config, "a", 1)
    config.devices[1].path.write_bytes(b"somebody's letters")
    with pytest.raises(DeviceError, match="is not a forebay device"):
        clear(config, delete=True)
    assert config.devices[1].path.read_bytes() == b"somebody's letters"


def test_clear_mends_a_damaged_journal(config):
    fill(config, "a", 1)
    config.journal_path.write_bytes(b"not a journal")
    clear(config)
    fill(config, "a", 1)


def test_clear_then_delete_mends_a_damaged_uuid(config):
    fill(config, "a", 1)
    (config.path / "uuid").write_text("not a uuid")
    clear(config)
    with pytest.raises(DeviceError, match=r"belongs to another pool .* delete "):
        fill(config, "a", 1)
