"""Whatever happens: nothing of somebody else's is removed, and nothing of ours is lost.

Random attaches and detaches, with refusals and lost connections in the middle, restarts of the target, and somebody
else who makes and removes things in it. No server stands behind the controllers, so that there can be many calls.
"""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from forebay.storage.errors import ForebayError
from forebay.storage.spdk.attach import attach
from forebay.storage.spdk.detach import detach
from forebay.storage.spdk.record import opened
from forebay.storage.spdk.target import Target
from forebay.storage.spdk.wanted import parse
from tests.storage.spdk.standin import Lost, Refused, Standin

DRIVES = {"0000:01:00.0": 1, "0000:02:00.0": 2, "0000:03:00.0": 0}
BDEVS = ("m0", "m1")
CHANGES = (
    "bdev_nvme_attach_controller",
    "bdev_nvme_detach_controller",
    "vhost_create_blk_controller",
    "vhost_delete_controller",
)
READS = ("bdev_get_bdevs", "vhost_get_controllers", "bdev_nvme_get_controllers")

failures = st.none() | st.tuples(
    st.sampled_from(CHANGES + READS),
    st.integers(0, 3),
    st.sampled_from([Refused(-32602, "Input/output error"), Lost(done=False), Lost(done=True)]),
)


class NoServer:
    """What a controller has instead of a storage daemon."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.connected = 0

    def sessions(self) -> int:
        return self.connected

    def kill(self) -> None:
        pass


class Watched(Standin):
    """Knows what was made by RPC: that is ours."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.ours: set[tuple[str, str]] = set()
        self.pulled: list[str] = []
        """Drives that were given back although somebody used them."""

    def start_server(self, file: Path, socket: Path) -> Any:
        return NoServer(socket)

    def _do(self, method: str, params: dict[str, Any]) -> Any:
        if method == "bdev_nvme_detach_controller" and self.in_use(params["name"]):
            self.pulled.append(params["name"])
        result = super()._do(method, params)
        kind = "drive" if "nvme" in method else "controller"
        if method in CHANGES[::2]:
            self.ours.add((kind, params["name" if kind == "drive" else "ctrlr"]))
        elif method in CHANGES:
            self.ours.discard((kind, params["name" if kind == "drive" else "ctrlr"]))
        return result

    def in_use(self, drive: str) -> bool:
        bdevs = {name: bdev for name, bdev in self.bdevs.items() if name.startswith(drive + "n")}
        served = any(bdev in bdevs for bdev, _ in self.controllers.values())
        return served or any(bdev["claimed"] for bdev in bdevs.values())

    def things(self) -> set[tuple[str, str]]:
        return {("drive", name) for name in self.attached} | {("controller", name) for name in self.controllers}


class Ownership(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.stack = contextlib.ExitStack()
        folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory(prefix="spdk", dir="/dev/shm")))
        file = folder / "file"
        file.write_bytes(bytes(512))
        drives = {pci: [file] * namespaces for pci, namespaces in DRIVES.items()}
        self.tgt = self.stack.enter_context(Watched(folder, dict.fromkeys(BDEVS, file), drives))
        self.target = Target(self.tgt.socket, 20)
        self.path = folder / "record.json"
        self.theirs: set[tuple[str, str]] = set()

    def teardown(self) -> None:
        for bdev in self.tgt.bdevs.values():
            bdev["claimed"] = False
        for _, server in self.tgt.controllers.values():
            server.connected = 0
        for name in [name for kind, name in self.theirs if kind == "controller"]:
            self.tgt.vhost_delete_controller(name)
        self.theirs = {thing for thing in self.theirs if thing[0] == "drive"}
        self.detach([], None)
        assert self.tgt.things() == self.theirs
        assert not self.path.exists()
        self.stack.close()

    def call(self, what: Any, failure: Any) -> None:
        self.tgt.failures = {failure[0]: failure[1:]} if failure else {}
        with contextlib.suppress(ForebayError), opened(self.path, self.tgt.socket) as record:
            what(record)
        self.tgt.failures = {}

    @rule(
        sources=st.lists(
            st.sampled_from([*DRIVES, *BDEVS, "alias/m0", "d0n1", "absent"]), min_size=1, max_size=3, unique=True
        ),
        named=st.booleans(),
        failure=failures,
    )
    def attach(self, sources: list[str], named: bool, failure: Any) -> None:
        names = [f"d{index}" for index in range(len(sources))] if named else []
        self.call(lambda record: attach(self.target, parse(sources, names), record), failure)

    @rule(names=st.lists(st.sampled_from(["d0", "d1", "m0", "other"]), max_size=2, unique=True), failure=failures)
    def detach(self, names: list[str], failure: Any) -> None:
        self.call(lambda record: detach(self.target, record, names), failure)

    @rule(bdev=st.sampled_from([*BDEVS, "d0n1", "theirsn1"]), name=st.sampled_from(["x", "d0.kv", "m1.kv"]))
    def they_serve(self, bdev: str, name: str) -> None:
        with contextlib.suppress(Refused), opened(self.path, self.tgt.socket) as record:
            if record.controllers.get(name) != bdev:  # the same name on the same bdev counts as ours
                self.tgt.vhost_create_blk_controller(name, bdev)
                self.theirs.add(("controller", name))

    @rule(pci=st.sampled_from(sorted(DRIVES)), name=st.sampled_from(["theirs", "d0"]))
    def they_take_a_drive(self, pci: str, name: str) -> None:
        with contextlib.suppress(Refused), opened(self.path, self.tgt.socket) as record:
            if record.drives.get(name) != pci and pci not in self.tgt.attached.values():
                self.tgt.bdev_nvme_attach_controller(name, "PCIe", pci)
                self.theirs.add(("drive", name))

    @precondition(lambda self: self.theirs)
    @rule(data=st.data())
    def they_remove_theirs(self, data: Any) -> None:
        thing = data.draw(st.sampled_from(sorted(self.theirs)))
        if thing[0] == "drive" and self.tgt.in_use(thing[1]):
            return
        with contextlib.suppress(Refused):
            remove = (
                self.tgt.vhost_delete_controller if thing[0] == "controller" else self.tgt.bdev_nvme_detach_controller
            )
            remove(thing[1])
            self.theirs.discard(thing)

    @rule(claimed=st.booleans(), data=st.data())
    def claim(self, claimed: bool, data: Any) -> None:
        self.tgt.bdevs[data.draw(st.sampled_from(sorted(self.tgt.bdevs)))]["claimed"] = claimed

    @precondition(lambda self: self.tgt.controllers)
    @rule(data=st.data(), count=st.integers(0, 1))
    def connect(self, data: Any, count: int) -> None:
        self.tgt.controllers[data.draw(st.sampled_from(sorted(self.tgt.controllers)))][1].connected = count

    @rule()
    def restart(self) -> None:
        self.tgt.restart()
        self.theirs.clear()
        self.tgt.ours.clear()

    @invariant()
    def nothing_of_theirs_is_gone(self) -> None:
        assert self.theirs <= self.tgt.things()

    @invariant()
    def nothing_in_use_was_pulled(self) -> None:
        assert not self.tgt.pulled

    @invariant()
    def nothing_of_ours_is_lost(self) -> None:
        with opened(self.path, self.tgt.socket) as record:
            known = {("drive", name) for name in record.drives} | {("controller", name) for name in record.controllers}
        assert self.tgt.ours <= known

    @invariant()
    def no_bdev_of_ours_is_served_twice(self) -> None:
        ours = [bdev for name, (bdev, _) in self.tgt.controllers.items() if ("controller", name) in self.tgt.ours]
        assert len(ours) == len(set(ours))


TestOwnership = Ownership.TestCase
TestOwnership.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
