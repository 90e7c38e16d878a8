"""The whole way through one target: bdevs in memory are attached, used as devices, and detached.

With `FOREBAY_TEST_SPDK_SOCKET` this is a real one, and every device passes the conformance suite as well:

    sudo FOREBAY_TEST_SPDK_SOCKET=/var/tmp/spdk.sock make test ARGS=tests/storage/spdk/test_real_target.py

Without, it is the stand-in, which shows that the test itself works. It needs 256 MiB of the target's memory and 64 free
huge pages of 2 MiB, and touches nothing but bdevs called `forebay-test-...` that it makes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.storage.config import DeviceConfig
from forebay.storage.device import superblock
from forebay.storage.device.base import Device, Direction, Op
from forebay.storage.spdk.attach import Attached, attach
from forebay.storage.spdk.detach import DetachError, detach
from forebay.storage.spdk.record import opened
from forebay.storage.spdk.rpc import Rpc
from forebay.storage.spdk.status import status
from forebay.storage.spdk.target import Target
from forebay.storage.spdk.wanted import parse
from forebay.storage.testing import DeviceConformance, Memory, run
from tests.storage.device.test_spdk import opened as opened_device
from tests.storage.device.vhost import huge_pages

REAL = os.environ.get("FOREBAY_TEST_SPDK_SOCKET", "")
pytestmark = [] if REAL else pytest.mark.needs("qemu-storage-daemon")

SIZE = 64 << 20
SECTOR = 512


class Lender:
    """Makes bdevs in the target's memory and serves them."""

    def __init__(self, target: Target, record: Path) -> None:
        self.target = target
        self.path = record
        self.bdevs: list[str] = []

    def serve(self) -> Attached:
        name = f"forebay-test-{os.getpid()}-{len(self.bdevs)}"
        blocks = (SIZE + superblock.SIZE) // SECTOR
        self.target.send(Rpc("bdev_malloc_create", {"name": name, "num_blocks": blocks, "block_size": SECTOR}))
        self.bdevs.append(name)
        with opened(self.path, self.target.address) as record:
            return attach(self.target, parse([name]), record).devices[0]

    def detach(self) -> None:
        with opened(self.path, self.target.address) as record:
            detach(self.target, record)

    def close(self) -> None:
        self.detach()
        for name in self.bdevs:
            self.target.send(Rpc("bdev_malloc_delete", {"name": name}))


@pytest.fixture
def lender(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Lender]:
    socket = Path(REAL) if REAL else request.getfixturevalue("tgt").socket
    with huge_pages(64), contextlib.closing(Lender(Target(socket), tmp_path / "record.json")) as made:
        yield made


def device_at(served: Attached) -> Device:
    return opened_device(
        DeviceConfig.model_validate({"name": "nvme0", "kind": "spdk", "path": served.path, "depth": 8})
    )


def test_the_whole_way(lender):
    served = [lender.serve(), lender.serve()]
    data = [os.urandom(3 << 20) for _ in served]
    with contextlib.ExitStack() as stack:
        devices = [stack.enter_context(contextlib.closing(device_at(one))) for one in served]
        for device, content in zip(devices, data):
            buffer = Memory(len(content), content)
            done = run(device, [Op(1, Direction.WRITE, 0, len(content), [buffer.piece(0, len(content))], True)])
            assert done[1].result == len(content)
        for device, content in zip(devices, data):
            buffer = Memory(len(content))
            run(device, [Op(1, Direction.READ, 0, len(content), [buffer.piece(0, len(content))], True)])
            assert buffer[: len(content)] == content
        with pytest.raises(DetachError, match="1 initiator connected"):
            lender.detach()
        with opened(lender.path, lender.target.address) as record:
            found = status(lender.target, record)
        ours = [one.controller for one in found.controllers if one.ours]
        assert [(one.bdev, one.sessions) for one in ours] == [(one.bdev, 1) for one in served]
    lender.detach()
    assert not {one.name for one in lender.target.controllers()} & {f"{one.name}.kv" for one in served}


if REAL:

    class TestConformance(DeviceConformance):
        """Devices behind SPDK's own vhost."""

        @pytest.fixture(autouse=True)
        def lend(self, lender: Lender) -> None:
            self.lender, self.served = lender, dict[Path, Attached]()

        def open(self, folder: Path) -> Device:
            folder.mkdir(exist_ok=True)
            if folder not in self.served:
                self.served[folder] = self.lender.serve()
            return device_at(self.served[folder])
