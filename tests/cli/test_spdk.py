"""`forebay spdk`: what it prints and how it exits. What it does is tested with forebay.storage.spdk."""

from __future__ import annotations

import contextlib
import os
import socket

import pytest
import yaml

from forebay.cli.app import main
from forebay.storage.config import DeviceConfig
from forebay.storage.device import host_memory, open_device, prepare_device
from forebay.storage.device.base import Direction, Op
from forebay.storage.testing import Memory, run
from tests.cli.conftest import Outcome
from tests.storage.device.vhost import huge_pages
from tests.storage.spdk.conftest import PCI, standin, tgt  # noqa: F401

pytestmark = pytest.mark.needs("qemu-storage-daemon")


@pytest.fixture
def spdk(tgt, tmp_path, monkeypatch, capsys):  # noqa: F811
    """`spdk("attach", ...)` at the stand-in, in this process: a second apiece would add up."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(command, *arguments):
        state = str(tmp_path / "state.json")
        monkeypatch.setattr(
            "sys.argv", ["forebay", "spdk", command, "--socket", str(tgt.socket), "--state", state, *arguments]
        )
        with pytest.raises(SystemExit) as done:
            main()
        return Outcome(int(done.value.code or 0), *capsys.readouterr())

    return run


def test_attach_prints_devices_for_the_pool(spdk, tgt):  # noqa: F811
    done = spdk("attach", PCI, "Malloc0", "--name", "nvme0", "--name", "ram")
    assert (done.code, done.err) == (0, "")
    assert yaml.safe_load(done.out) == {
        "devices": [
            {"name": "nvme0", "kind": "spdk", "path": f"{tgt.folder}/nvme0.kv"},
            {"name": "ram", "kind": "spdk", "path": f"{tgt.folder}/ram.kv"},
        ]
    }
    again = spdk("attach", PCI, "Malloc0", "--name", "nvme0", "--name", "ram")
    assert again.out == done.out
    assert "controller nvme0.kv serves nvme0n1 already" in again.err


def test_what_attach_prints_is_a_device(spdk, tgt):  # noqa: F811
    """The whole way: attach, open the device as a pool does, see it connected, be refused, give it back."""
    printed = yaml.safe_load(spdk("attach", PCI, "--name", "nvme0").out)
    config = DeviceConfig.model_validate(printed["devices"][0] | {"depth": 2})
    data = os.urandom(256 << 10)
    with huge_pages(8), contextlib.ExitStack() as stack:
        prepare_device(config, bytes(16))
        memory = host_memory([config])
        stack.callback(memory.close)
        device = stack.enter_context(contextlib.closing(open_device(config, pool_uuid=bytes(16), memory=memory)))
        buffer = Memory(len(data), data)
        done = run(device, [Op(1, Direction.WRITE, 4096, len(data), [buffer.piece(0, len(data))], False)])
        assert done[1].result == len(data)
        assert spdk("status", "--json").data["controllers"][0]["controller"]["sessions"] == 1
        assert "1 initiator connected" in spdk("detach").err
    assert data in tgt.files["nvme0n1"].read_bytes()
    assert spdk("detach").code == 0
    assert tgt.attached == {}


def test_dry_run(spdk, tgt):  # noqa: F811
    done = spdk("attach", PCI, "--name", "nvme0", "--dry-run")
    assert done.out.splitlines() == [
        f'bdev_nvme_attach_controller {{"name": "nvme0", "trtype": "PCIe", "traddr": "{PCI}", "multipath": "disable"}}',
        'vhost_create_blk_controller {"ctrlr": "nvme0.kv", "dev_name": "nvme0n1"}',
    ]
    assert tgt.changes() == []
    data = spdk("attach", PCI, "--name", "nvme0", "--dry-run", "--json").data
    assert [rpc["method"] for rpc in data["rpcs"]] == ["bdev_nvme_attach_controller", "vhost_create_blk_controller"]


def test_status(spdk, tgt):  # noqa: F811
    spdk("attach", PCI, "--name", "nvme0")
    tgt.traffic["nvme0n1"] = {"bytes_read": 8192, "num_read_ops": 2, "read_latency_ticks": 2_400_000}
    table = spdk("status").out
    assert "SPDK v26.09" in table
    assert next(line.split() for line in table.splitlines() if line.startswith("nvme0n1")) == [
        *("nvme0n1", "NVMe", "disk", PCI, "3.0", "MiB", "ours", "8.0", "KiB", "500", "us", "0", "B"),
    ]
    assert next(line.split() for line in table.splitlines() if line.startswith("nvme0.kv")) == [
        *("nvme0.kv", "nvme0n1", "0", "ours", f"{tgt.folder}/nvme0.kv"),
    ]
    data = spdk("status", "--json").data
    assert data["controllers"][0]["controller"]["sessions"] == 0


def test_status_of_what_is_gone(spdk, tgt):  # noqa: F811
    spdk("attach", "Malloc0")
    tgt.restart()
    done = spdk("status")
    assert (done.code, "Malloc0.kv is on record as ours but not there" in done.err) == (1, True)
    assert spdk("status", "--json").data["ok"] is False


def test_names_that_yaml_would_take_for_something_else(spdk):
    done = spdk("attach", "Malloc0", "Malloc1", "--name", "1e3", "--name", "no")
    assert [device["name"] for device in yaml.safe_load(done.out)["devices"]] == ["1e3", "no"]


def test_detach(spdk, tgt):  # noqa: F811
    spdk("attach", "Malloc0")
    with socket.socket(socket.AF_UNIX) as initiator:
        initiator.connect(str(tgt.folder / "Malloc0.kv"))
        refused = spdk("detach", "--json")
    assert refused.code == 1
    assert "stop the engine that uses" in refused.data["error"]
    assert spdk("detach", "--dry-run").out == 'vhost_delete_controller {"ctrlr": "Malloc0.kv"}\n'
    assert spdk("detach").code == 0
    assert tgt.controllers == {}
    assert "nothing to undo" in spdk("detach").err


def test_socket_from_the_environment(forebay, tgt, monkeypatch):  # noqa: F811
    monkeypatch.setenv("FOREBAY_SPDK_SOCKET", str(tgt.socket))
    assert forebay("spdk", "status", "--json").data["socket"] == str(tgt.socket)


def test_errors_are_one_line(forebay, spdk):
    done = forebay("spdk", "status", "--socket", "absent")
    assert done.code == 1
    assert done.err == (
        "error: SPDK at absent: bdev_get_bdevs: No such file or directory; start spdk_tgt, or give --socket\n"
    )
    assert spdk("attach", "Malloc0", "--name", "a/b").code == 2
    assert "bdev '[x]' is not in the target" in spdk("attach", "[x]", "--name", "a").err
