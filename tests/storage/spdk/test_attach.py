"""Attach, status and detach against a stand-in whose controllers are real vhost-user-blk servers."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import struct
import subprocess
import sys
import time

import pytest

from forebay.storage.errors import ConfigError
from forebay.storage.spdk.attach import AttachError, attach
from forebay.storage.spdk.detach import DetachError, detach
from forebay.storage.spdk.record import RecordError, load, opened
from forebay.storage.spdk.rpc import SpdkError
from forebay.storage.spdk.status import status
from forebay.storage.spdk.target import Target
from forebay.storage.spdk.wanted import parse
from tests.storage.spdk.conftest import PCI, TWO_NAMESPACES
from tests.storage.spdk.standin import Lost, Refused, Standin

pytestmark = pytest.mark.needs("qemu-storage-daemon")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "state" / "record.json"


@pytest.fixture
def run(tgt, target, path):
    """`run(attach, ...)` and `run(detach, ...)` with the record on file, as the commands do."""

    def run(what, *arguments, to=target, **options):
        with opened(path, tgt.socket) as record:
            if what is attach:
                return attach(to, parse(*arguments), record, **options)
            return detach(to, record, *arguments, **options)

    return run


def on_record(path, tgt):
    record = load(path, tgt.socket)
    return record.controllers, record.drives


def speaks_vhost_user(path):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(str(path))
        connection.sendall(struct.pack("<III", 1, 1, 0))  # GET_FEATURES
        with connection.makefile("rb") as answers:
            return len(answers.read(20)) == 20


@contextlib.contextmanager
def initiator(tgt, controller):
    server = tgt.controllers[controller][1]
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(server.socket))
        while not server.sessions():
            pass
        yield
    while server.sessions():
        pass


def test_bdev_by_name(run, tgt, path):
    done = run(attach, ["Malloc0"])
    (device,) = done.devices
    assert (device.name, device.bdev, device.size, device.made) == ("Malloc0", "Malloc0", 1 << 20, True)
    assert device.path == tgt.folder / "Malloc0.kv"
    assert speaks_vhost_user(device.path)
    assert on_record(path, tgt) == ({"Malloc0.kv": "Malloc0"}, {})


def test_drive_by_address(run, tgt, path):
    done = run(attach, ["5E:00.0"], ["nvme0"])
    assert [(one.name, one.bdev, one.size) for one in done.devices] == [("nvme0", "nvme0n1", 3 << 20)]
    assert tgt.requests[3] == (
        "bdev_nvme_attach_controller",
        {"name": "nvme0", "trtype": "PCIe", "traddr": PCI, "multipath": "disable"},
    )
    assert on_record(path, tgt) == ({"nvme0.kv": "nvme0n1"}, {"nvme0": PCI})


def test_drive_of_several_namespaces(run, tgt):
    done = run(attach, [TWO_NAMESPACES], ["nvme1"])
    assert [(one.name, one.bdev) for one in done.devices] == [("nvme1n1", "nvme1n1"), ("nvme1n2", "nvme1n2")]
    run(detach, ["nvme1n1"])
    assert (list(tgt.controllers), list(tgt.attached)) == (["nvme1n2.kv"], ["nvme1"])
    run(detach, ["nvme1n2"])
    assert (tgt.controllers, tgt.attached) == ({}, {})


def test_drive_without_a_namespace(run, tgt, path):
    tgt.drives["0000:01:00.0"] = []
    with pytest.raises(AttachError, match="has no namespace"):
        run(attach, ["0000:01:00.0"])
    assert tgt.attached == {}
    assert on_record(path, tgt) == ({}, {})


def test_names_without_a_name(run):
    done = run(attach, [PCI, "alias/Malloc0"])
    assert [one.name for one in done.devices] == ["nvme-0000-5e-00.0", "alias-Malloc0"]


@pytest.mark.parametrize("old", [False, True])
def test_again_is_harmless(standin, path, old):
    tgt = standin(old=old)
    target = Target(tgt.socket, 10)
    with opened(path, tgt.socket) as record:
        first = attach(target, parse([PCI, "Malloc0"]), record)
        changes = tgt.changes()
        again = attach(target, parse([PCI, "Malloc0"]), record)
    assert tgt.changes() == changes
    assert [one.path for one in again.devices] == [one.path for one in first.devices]
    assert [one.made for one in again.devices] == [False, False]
    assert len(again.notes) == 3
    assert again.sent == []


def test_foreign_controller_as_wanted_is_used_and_never_removed(run, tgt, path):
    served = tgt.serve("Malloc0.kv", "Malloc0")
    done = run(attach, ["Malloc0"])
    assert done.devices[0].path == served
    assert on_record(path, tgt) == ({}, {})
    run(detach)
    assert list(tgt.controllers) == ["Malloc0.kv"]


def test_foreign_drive_stays_with_the_target(run, tgt, path):
    tgt.bdev_nvme_attach_controller("Nvme7", "PCIe", PCI)
    done = run(attach, [PCI], ["nvme0"])
    assert [(one.name, one.bdev) for one in done.devices] == [("nvme0", "Nvme7n1")]
    assert on_record(path, tgt) == ({"nvme0.kv": "Nvme7n1"}, {})
    run(detach)
    assert (tgt.controllers, list(tgt.attached)) == ({}, ["Nvme7"])


@pytest.mark.parametrize(
    ("prepare", "arguments", "problem"),
    [
        (lambda tgt: None, (["Nvme9n1"],), "'Nvme9n1' is not in the target .* lists those there are"),
        (lambda tgt: tgt.serve("x", "Malloc0"), (["Malloc0"],), "served by controller x already"),
        (lambda tgt: tgt.serve("a.kv", "Malloc1"), (["Malloc0"], ["a"]), "a.kv serves Malloc1, not Malloc0"),
        (lambda tgt: tgt.serve("a.kv", "Malloc1"), ([PCI], ["a"]), "a.kv is there already"),
        (lambda tgt: tgt.bdevs["Malloc0"].update(claimed=True), (["Malloc0"],), "claimed by another module"),
        (
            lambda tgt: tgt.bdev_nvme_attach_controller("n", "PCIe", TWO_NAMESPACES),
            ([PCI], ["n"]),
            f"calls another drive than {PCI} n;",
        ),
    ],
)
def test_refused_before_anything_is_changed(run, tgt, path, prepare, arguments, problem):
    prepare(tgt)
    sources, *names = arguments
    names = [[*names[0], "other"]] if names else []
    with pytest.raises(AttachError, match=problem):
        run(attach, [*sources, "Malloc1"], *names)
    assert tgt.changes() == []
    assert not path.exists()


@pytest.mark.parametrize("sources", [["Malloc0", "alias/Malloc0"], [PCI, "Nvme7n1"], ["Nvme7n1", PCI]])
@pytest.mark.parametrize("dry_run", [False, True])
def test_one_bdev_under_two_names(run, tgt, sources, dry_run):
    tgt.bdev_nvme_attach_controller("Nvme7", "PCIe", PCI)
    with pytest.raises(AttachError, match="is asked for twice, under two names; give it once"):
        run(attach, sources, ["a", "b"], dry_run=dry_run)
    assert tgt.changes() == []


@pytest.mark.parametrize(
    ("sources", "names", "problem"),
    [
        (["Malloc0"], ["a", "b"], "2 --name for 1"),
        (["Malloc0"], ["a/b"], "must be 1 to 64 letters"),
        (["x" * 65], [], "must be 1 to 64 letters"),
        (["Malloc0", "Malloc0"], ["a", "b"], "'Malloc0' is given twice"),
        (["5e:00.0", PCI], ["a", "b"], f"'{PCI}' is given twice"),
        (["Malloc0", "Malloc1"], ["a", "a"], "'a' is given twice"),
    ],
)
def test_odd_arguments(sources, names, problem):
    with pytest.raises(ConfigError, match=problem):
        parse(sources, names)


def test_dry_run_says_what_attach_then_does(run, tgt, path):
    planned = run(attach, [PCI, "Malloc0"], ["nvme0", "m"], dry_run=True)
    assert tgt.changes() == []
    assert not path.exists()
    done = run(attach, [PCI, "Malloc0"], ["nvme0", "m"])
    assert planned.sent == done.sent
    assert [(rpc.method, dict(rpc.params)) for rpc in done.sent] == [
        one for one in tgt.requests if one[0] in tgt.changes()
    ]


def test_detach_undoes_attach_and_nothing_else(run, tgt, path):
    tgt.serve("theirs", "Malloc1")
    run(attach, [PCI, "Malloc0"], ["nvme0", "m"])
    planned = run(detach, dry_run=True)
    assert list(tgt.controllers) == ["theirs", "nvme0.kv", "m.kv"]
    undone = run(detach)
    assert planned.sent == undone.sent
    assert [str(rpc) for rpc in undone.sent] == [
        'vhost_delete_controller {"ctrlr": "nvme0.kv"}',
        'vhost_delete_controller {"ctrlr": "m.kv"}',
        'bdev_nvme_detach_controller {"name": "nvme0"}',
    ]
    assert (list(tgt.controllers), tgt.attached) == (["theirs"], {})
    assert not path.exists()
    assert run(detach).sent == []


def test_detach_of_one(run, tgt, path):
    run(attach, [PCI, "Malloc0"], ["nvme0", "m"])
    run(detach, ["m"])
    assert on_record(path, tgt) == ({"nvme0.kv": "nvme0n1"}, {"nvme0": PCI})
    assert (list(tgt.controllers), list(tgt.attached)) == (["nvme0.kv"], ["nvme0"])


def test_detach_of_one_named_twice(run, tgt):
    run(attach, ["Malloc0"], ["m"])
    assert len(run(detach, ["m", "m"]).sent) == 1
    assert tgt.controllers == {}


def test_controller_whose_bdev_has_vanished_is_still_ours(run, tgt, path):
    run(attach, ["Malloc0"], ["m"])
    del tgt.bdevs["Malloc0"]
    assert [one.ours for one in status(Target(tgt.socket), load(path, tgt.socket)).controllers] == [True]
    run(detach)
    assert tgt.controllers == {}


def test_controller_for_scsi_under_our_name_is_not_ours(run, tgt, path, monkeypatch):
    run(attach, ["Malloc0"], ["m"])
    scsi = [{"ctrlr": "m.kv", "socket": "/s", "sessions": [], "backend_specific": {"scsi": []}}]
    monkeypatch.setattr(Standin, "vhost_get_controllers", lambda self: scsi)
    assert [one.ours for one in status(Target(tgt.socket), load(path, tgt.socket)).controllers] == [False]
    assert run(detach).notes == ["controller m.kv serves no bdev now: somebody else made it, it stays"]


def test_detach_of_what_is_not_ours(run, tgt):
    tgt.serve("theirs.kv", "Malloc1")
    with pytest.raises(DetachError, match="'theirs' was not made by `forebay spdk attach`, which made nothing"):
        run(detach, ["theirs"])


@pytest.mark.parametrize("delete_waits", [False, True])
def test_detach_is_refused_while_an_initiator_is_connected(standin, path, delete_waits):
    tgt = standin(delete_waits=delete_waits)
    target = Target(tgt.socket, 10)
    with opened(path, tgt.socket) as record:
        attach(target, parse(["Malloc0", "Malloc1"], ["a", "b"]), record)
        with (
            initiator(tgt, "b.kv"),
            pytest.raises(DetachError, match=r"b\.kv has 1 initiator connected; stop the engine"),
        ):
            detach(target, record)
        assert list(tgt.controllers) == ["a.kv", "b.kv"]
        detach(target, record)
    assert tgt.controllers == {}


def test_detach_from_an_older_target_that_does_not_count_sessions(standin, path):
    tgt = standin(old=True)
    target = Target(tgt.socket, 10)
    with opened(path, tgt.socket) as record:
        attach(target, parse(["Malloc0", "Malloc1"], ["a", "b"]), record)
        with (
            initiator(tgt, "b.kv"),
            pytest.raises(SpdkError, match=r"busy .*; an initiator is connected: stop the engine"),
        ):
            detach(target, record)
    assert on_record(path, tgt) == ({"b.kv": "Malloc1"}, {})


def test_initiator_that_connects_after_the_check(standin, path, monkeypatch):
    tgt = standin(delete_waits=True)
    target = Target(tgt.socket, seconds=0.5)
    with opened(path, tgt.socket) as record:
        attach(Target(tgt.socket, 10), parse(["Malloc0"], ["a"]), record)
        with initiator(tgt, "a.kv"):
            monkeypatch.setattr("forebay.storage.spdk.detach._Removal._refuse_connected", lambda *_: None)
            with pytest.raises(SpdkError, match=r"no answer after 0\.5 s"):
                detach(target, record)
        assert on_record(path, tgt)[0] == {"a.kv": "Malloc0"}
        while tgt.controllers:  # the target does it once the initiator has gone
            pass
        assert detach(target, record).notes == ["controller a.kv is gone already"]
    assert not path.exists()


def test_drive_that_somebody_else_uses_by_now_stays(run, tgt, path):
    run(attach, [PCI], ["nvme0"])
    tgt.bdevs["nvme0n1"]["claimed"] = True
    assert run(detach).notes == [f"drive nvme0 ({PCI}) stays: nvme0n1 uses it"]
    assert (tgt.controllers, list(tgt.attached)) == ({}, ["nvme0"])
    tgt.bdevs["nvme0n1"]["claimed"] = False
    run(detach)
    assert tgt.attached == {}


def test_after_the_target_was_restarted(run, tgt, path):
    run(attach, [PCI, "Malloc0"], ["nvme0", "m"])
    tgt.restart()
    tgt.serve("m.kv", "Malloc1")  # somebody else's, under our names
    tgt.bdev_nvme_attach_controller("nvme0", "PCIe", TWO_NAMESPACES)
    assert status(Target(tgt.socket), load(path, tgt.socket)).missing == ["nvme0.kv", "m.kv", "nvme0"]
    undone = run(detach)
    assert undone.sent == []
    assert [note.partition(" is ")[0] for note in undone.notes[::2]] == ["controller nvme0.kv", f"drive nvme0 ({PCI})"]
    assert "m.kv serves Malloc1 now: somebody else made it, it stays" in undone.notes[1]
    assert (list(tgt.controllers), list(tgt.attached)) == (["m.kv"], ["nvme0"])
    assert not path.exists()


def test_attach_again_after_a_restart(run, tgt, path):
    run(attach, [PCI], ["nvme0"])
    tgt.restart()
    assert run(attach, [PCI], ["nvme0"]).devices[0].made
    assert on_record(path, tgt) == ({"nvme0.kv": "nvme0n1"}, {"nvme0": PCI})


@pytest.mark.parametrize("fails", ["bdev_nvme_attach_controller", "vhost_create_blk_controller"])
def test_refusal_undoes_what_the_call_made_and_keeps_what_was(run, tgt, path, fails):
    run(attach, ["Malloc1"], ["old"])
    before = on_record(path, tgt)
    tgt.failures[fails] = (1, Refused(-32602, "Input/output error"))
    with pytest.raises(SpdkError, match="Input/output error"):
        run(attach, [PCI, "Malloc0", TWO_NAMESPACES], ["a", "b", "c"])
    assert (list(tgt.controllers), tgt.attached) == (["old.kv"], {})
    assert on_record(path, tgt) == before


def test_what_cannot_be_undone_stays_on_record(run, tgt, path):
    tgt.drives["0000:01:00.0"] = []
    tgt.failures["vhost_delete_controller"] = (0, Refused(-32602, "Device or resource busy"))
    with pytest.raises(
        AttachError, match=r"the drive at .* has no namespace.*; a\.kv stays, `forebay spdk detach` removes"
    ):
        run(attach, ["Malloc0", "0000:01:00.0"], ["a", "b"])
    assert list(tgt.controllers) == ["a.kv"]
    assert on_record(path, tgt) == ({"a.kv": "Malloc0"}, {})
    run(detach)
    assert tgt.controllers == {}


def test_target_that_stops_answering_leaves_everything_on_record(run, tgt, path):
    tgt.failures["bdev_nvme_attach_controller"] = (0, lambda: time.sleep(1.5))
    with pytest.raises(
        AttachError, match=r"no answer after 0\.5 s.*on record as ours: a\.kv, b \(`forebay spdk detach`"
    ):
        run(attach, ["Malloc0", PCI], ["a", "b"], to=Target(tgt.socket, 0.5))
    assert on_record(path, tgt) == ({"a.kv": "Malloc0"}, {"b": PCI})
    undone = run(detach)  # waits for the target, which has attached the drive by then
    assert [rpc.method for rpc in undone.sent] == ["vhost_delete_controller", "bdev_nvme_detach_controller"]
    assert (tgt.controllers, tgt.attached) == ({}, {})


def test_what_a_slow_target_did_in_the_meantime_is_still_ours(run, tgt, path):
    tgt.failures["vhost_create_blk_controller"] = (0, Lost(done=False))
    with pytest.raises(AttachError, match="closed the connection"):
        run(attach, ["Malloc0"], ["a"])
    tgt.failures["vhost_create_blk_controller"] = (0, lambda: tgt.serve("a.kv", "Malloc0"))
    with pytest.raises(SpdkError, match="File exists"):
        run(attach, ["Malloc0"], ["a"])
    assert on_record(path, tgt) == ({"a.kv": "Malloc0"}, {})


def test_killed_in_the_middle(tgt, path):
    """What the target does after we are gone is on record already."""
    code = f"""if True:
        import pathlib
        from forebay.storage.spdk import attach, record, target, wanted
        path, socket = pathlib.Path({str(path)!r}), pathlib.Path({str(tgt.socket)!r})
        with record.opened(path, socket) as ours:
            attach.attach(target.Target(socket), wanted.parse(["Malloc0"], ["a"]), ours)
    """
    process = subprocess.Popen([sys.executable, "-c", code])
    tgt.failures["vhost_create_blk_controller"] = (0, lambda: (process.kill(), process.wait()))
    assert process.wait() == -signal.SIGKILL
    while "a.kv" not in tgt.controllers:
        pass
    with opened(path, tgt.socket) as record:
        detach(Target(tgt.socket), record)
    assert tgt.controllers == {}


def test_status(run, tgt, path):
    tgt.serve("theirs", "Malloc1")
    run(attach, [PCI], ["nvme0"])
    tgt.traffic["nvme0n1"] = {"bytes_read": 8192, "num_read_ops": 2, "read_latency_ticks": 2_400_000}
    found = status(Target(tgt.socket), load(path, tgt.socket))
    assert found.version == "SPDK v26.09 git sha1 standin"
    assert [(one.bdev.name, one.ours) for one in found.bdevs] == [
        ("Malloc0", False),
        ("Malloc1", False),
        ("nvme0n1", True),
    ]
    traffic = found.bdevs[2].traffic
    assert (traffic.read_bytes, traffic.read_ops, traffic.read_seconds) == (8192, 2, 0.001)
    assert [(one.controller.name, one.ours) for one in found.controllers] == [("theirs", False), ("nvme0.kv", True)]
    assert found.missing == []
    with initiator(tgt, "nvme0.kv"):
        assert [one.controller.sessions for one in status(Target(tgt.socket), load(path, tgt.socket)).controllers] == [
            0,
            1,
        ]


@pytest.mark.parametrize(
    "answer", [None, 7, [7], [{}], {"bdevs": 1}, [{"name": "x", "block_size": "y", "num_blocks": 1}]]
)
def test_answers_of_another_shape(tgt, target, monkeypatch, answer):
    monkeypatch.setattr(Standin, "bdev_get_bdevs", lambda self: answer)
    with pytest.raises(SpdkError, match="bdev_get_bdevs: cannot make sense of the answer"):
        target.bdevs()


@pytest.mark.parametrize(
    "text",
    ["", "garbage", "[]", "{}", json.dumps({"format": 2, "target": "x", "controllers": {}, "drives": {}}), "\x00"],
)
def test_damaged_record(tgt, path, text):
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(RecordError, match=f"{path} is not a record of `forebay spdk attach`; move it away"):
        load(path, tgt.socket)


def test_record_of_another_target(run, tgt, path, tmp_path):
    run(attach, ["Malloc0"])
    with pytest.raises(RecordError, match=f"is of the target at {tgt.socket}, not .*; give its --socket"):
        load(path, tmp_path / "other.sock")


def test_two_at_once(run, tgt, path):
    with opened(path, tgt.socket), pytest.raises(RecordError, match="another `forebay spdk` changes"):
        run(attach, ["Malloc0"])
    assert tgt.requests == []


def test_record_is_private(run, path):
    run(attach, ["Malloc0"])
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_record_that_cannot_be_written_stops_attach_before_the_target_is_asked(run, tgt, path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("forebay.storage.spdk.record.os.fsync", full)
    with pytest.raises(RecordError, match="No space left on device; give another --state"):
        run(attach, ["Malloc0"])
    assert tgt.changes() == []
