"""Drives behind a vhost-user-blk socket, served by QEMU's storage daemon."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forebay.bench.storage_daemon import StorageDaemon, throttled
from forebay.storage.config import DeviceConfig
from forebay.storage.device import host_memory, open_device, prepare_device, superblock
from forebay.storage.device._native import Queue, virtqueue
from forebay.storage.device.base import Completion, Device, Direction, Op
from forebay.storage.device.spdk import SpdkDevice, memory_needed
from forebay.storage.doctor import check_drive, check_huge_pages
from forebay.storage.errors import DeviceError, PoolError
from forebay.storage.host_memory import HUGE_PAGE, HostMemory
from forebay.storage.testing import DeviceConformance, Memory, run
from tests.storage.device.vhost import huge_pages, rte_target

pytestmark = pytest.mark.needs("root", "qemu-storage-daemon")
RTE = pytest.mark.needs("librte_vhost.so.23")
UUID = bytes(range(16))
MIB = 1 << 20
SIZE = 64 * MIB
READ, WRITE = Direction.READ, Direction.WRITE


@pytest.fixture(scope="module", autouse=True)
def pages() -> Iterator[None]:
    with huge_pages(100):
        yield


def config(folder: Path, **fields: object) -> DeviceConfig:
    return DeviceConfig.model_validate(
        {"name": "nvme0", "kind": "spdk", "path": folder / "socket", "size": SIZE, "depth": 8, **fields}
    )


def opened(wanted: DeviceConfig) -> Device:
    """Prepared and open; its memory is closed after it."""
    prepare_device(wanted, UUID)
    memory = host_memory([wanted])
    assert memory is not None
    try:
        device = open_device(wanted, pool_uuid=UUID, memory=memory)
    except BaseException:
        memory.close()
        raise
    close = device.close

    def close_both() -> None:
        close()
        memory.close()

    device.close = close_both  # type: ignore[method-assign]
    return device


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[StorageDaemon]:
    with StorageDaemon(tmp_path / "disk", tmp_path / "socket", SIZE + superblock.SIZE) as running:
        yield running


@pytest.fixture
def device(tmp_path: Path, daemon: StorageDaemon) -> Iterator[Device]:
    with contextlib.closing(opened(config(tmp_path))) as made:
        yield made


class TestStorageDaemon(DeviceConformance):
    DEPTH = 8
    running: dict[Path, StorageDaemon]

    @pytest.fixture(autouse=True)
    def daemons(self) -> Iterator[None]:
        self.running = {}
        yield
        for daemon in self.running.values():
            daemon.kill()

    def open(self, folder: Path) -> Device:
        folder.mkdir(exist_ok=True)
        if folder not in self.running:
            self.running[folder] = StorageDaemon(folder / "disk", folder / "socket", SIZE + superblock.SIZE)
            self.running[folder].start()
        return opened(config(folder, depth=self.DEPTH))


class TestShallow(TestStorageDaemon):
    DEPTH = 1


@RTE
class TestRteVhost(DeviceConformance):
    """DPDK's library, on which SPDK's own server is built, with SPDK's limits; connections share its one socket."""

    @pytest.fixture(autouse=True)
    def targets(self) -> Iterator[None]:
        with contextlib.ExitStack() as self.stack:
            self.running: set[Path] = set()
            yield

    def open(self, folder: Path) -> Device:
        folder.mkdir(exist_ok=True)
        if folder not in self.running:
            self.stack.enter_context(rte_target(folder / "disk", folder / "socket", SIZE + superblock.SIZE))
            self.running.add(folder)
        return opened(config(folder))


@RTE
def test_two_clients_of_one_server(tmp_path: Path) -> None:
    """As tensor-parallel workers are: what one has written the other reads, and one leaves without the other."""
    memory = Memory(2 * MIB)
    memory[:MIB] = data = os.urandom(MIB)
    with rte_target(tmp_path / "disk", tmp_path / "socket", SIZE + superblock.SIZE):
        one, two = opened(config(tmp_path)), opened(config(tmp_path))
        with contextlib.closing(two):
            with contextlib.closing(one):
                assert run(one, [Op(1, WRITE, 0, MIB, [memory.piece(0, MIB)], True)])[1].result == MIB
            assert run(two, [Op(1, READ, 0, MIB, [memory.piece(MIB, MIB)], True)])[1].result == MIB
    assert memory[MIB : 2 * MIB] == data


# ---- memory ----


def test_shared_memory_is_read_into_directly(device: Device, daemon: StorageDaemon) -> None:
    """What lies in it is neither copied nor staged; several pieces and any length of whole blocks."""
    assert isinstance(device, SpdkDevice)
    data = os.urandom(3 * MIB)
    with daemon.file.open("r+b") as file:
        file.seek(superblock.SIZE)
        file.write(data)
        os.fsync(file.fileno())
    size = memory_needed(config(daemon.socket.parent))
    assert device.memory.size >= size
    first = device.memory.take(MIB)
    done = run(device, [Op(1, READ, 0, MIB, [(first, MIB // 2), (first + MIB // 2, MIB // 2)], True)])[1]
    assert done.result == MIB
    assert ctypes.string_at(first, MIB) == data[:MIB]


def test_fewer_huge_pages_than_needed() -> None:
    free = int(Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages").read_text())
    with pytest.raises(PoolError, match=rf"{free + 7} huge pages of 2 MiB are needed, {free} are free .* as root run"):
        HostMemory((free + 7) * HUGE_PAGE)


def test_memory_is_handed_out_once() -> None:
    with contextlib.closing(HostMemory(2 * HUGE_PAGE)) as memory:
        taken = [memory.take(size) for size in (1, 4096, 4097, HUGE_PAGE)]
        assert [address - memory.address for address in taken] == [0, 4096, 8192, 16384]
        with pytest.raises(PoolError, match=r"are asked for, .* are left"):
            memory.take(HUGE_PAGE)


def test_parts_must_lie_in_what_is_shared() -> None:
    with contextlib.closing(HostMemory(2 * HUGE_PAGE)) as memory:
        base, size = memory.address, memory.size
        good = {"shared": (base, size), "ring": base, "arena": base + HUGE_PAGE, "slot": MIB, "segments": (126, MIB)}
        for wrong in (
            {"ring": base - 4096}, {"ring": base + size - 4096}, {"arena": base + size - MIB}, {"slot": 0},
            {"segments": (127, MIB)}, {"segments": (0, MIB)}, {"segments": (126, 0)}, {"fd": 0},
        ):  # fmt: skip
            with pytest.raises(ValueError, match="Queue:"):
                Queue("vhost", "kv-x", SIZE, 2, **{**good, **wrong})  # type: ignore[arg-type]
        assert virtqueue(base, 1)[0] >= 2


# ---- what goes wrong ----


def wait_for(condition: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def read(device: Device, tag: int = 1, length: int = 4096) -> Completion:
    memory = Memory(length)
    return run(device, [Op(tag, READ, 0, length, [memory.piece(0, length)], False)])[tag]


def test_a_server_that_dies_and_comes_back(device: Device, daemon: StorageDaemon) -> None:
    """What is in flight fails, nothing hangs, what was written is there afterwards."""
    data = os.urandom(MIB)
    source, target = Memory(MIB), Memory(MIB)
    source[:MIB] = data
    assert run(device, [Op(1, WRITE, 0, MIB, [source.piece(0, MIB)], True)])[1].result == MIB
    device.flush()
    daemon.freeze()
    device.submit([Op(tag, READ, 0, MIB, [target.piece(0, MIB)], False) for tag in range(2, 20)])
    time.sleep(0.1)
    assert device.poll() == []
    daemon.kill()
    found: list[Completion] = []
    wait_for(lambda: bool(found.extend(device.poll()) or len(found) == 18))
    assert {one.result for one in found} == {-errno.ENOTCONN}
    assert read(device).result == -errno.ENOTCONN
    with pytest.raises(OSError, match="not connected"):
        device.flush()
    daemon.start()
    wait_for(lambda: read(device).result == 4096)
    assert run(device, [Op(1, READ, 0, MIB, [target.piece(0, MIB)], False)])[1].result == MIB
    assert target[:MIB] == data
    device.flush()


def test_a_server_that_comes_back_with_another_drive(device: Device, daemon: StorageDaemon, tmp_path: Path) -> None:
    daemon.kill()
    wait_for(lambda: read(device).result == -errno.ENOTCONN)
    with StorageDaemon(tmp_path / "other", daemon.socket, SIZE + superblock.SIZE):
        time.sleep(2.5)
        assert read(device).result == -errno.ENOTCONN
    daemon.start()
    wait_for(lambda: read(device).result == 4096)


def test_closing_while_the_server_hangs(tmp_path: Path, daemon: StorageDaemon) -> None:
    made = opened(config(tmp_path))
    memory = Memory(MIB)
    daemon.freeze()
    made.submit([Op(tag, READ, 0, MIB, [memory.piece(0, MIB)], False) for tag in range(4)])
    time.sleep(0.1)
    before = time.monotonic()
    made.close()
    assert time.monotonic() - before < 12
    assert sorted(one.result for one in made.poll()) == [-errno.ENOTCONN] * 4


def test_cancelled_while_the_server_hangs(device: Device, daemon: StorageDaemon) -> None:
    """A staged operation is over at once; what the server brings later goes nowhere."""
    memory = Memory(MIB)
    daemon.freeze()
    device.submit([Op(1, READ, 0, MIB, [memory.piece(0, MIB)], False)])
    time.sleep(0.1)
    device.cancel([1])
    assert [one.result for one in device.poll()] == [-errno.ECANCELED]
    memory[:MIB] = bytes([7]) * MIB
    daemon.thaw()
    assert read(device, 2).result == 4096
    assert memory[:MIB] == bytes([7]) * MIB


def test_an_error_of_the_drive_is_that_operations(tmp_path: Path) -> None:
    """blkdebug fails reads of one sector."""
    sector = (superblock.SIZE + 8 * MIB) // 512
    filters = (
        "--blockdev", f"driver=blkdebug,node-name=bad,image=disk,inject-error.0.event=none,"
        f"inject-error.0.iotype=read,inject-error.0.sector={sector},inject-error.0.errno=5",
    )  # fmt: skip
    disk = tmp_path / "disk"
    with (
        StorageDaemon(disk, tmp_path / "socket", SIZE + superblock.SIZE, filters=filters, node="bad"),
        contextlib.closing(opened(config(tmp_path))) as device,
    ):
        memory = Memory(3 * MIB)
        ops = [Op(tag, READ, tag * 4 * MIB, MIB, [memory.piece(tag * MIB, MIB)], False) for tag in range(3)]
        assert {tag: one.result for tag, one in run(device, ops).items()} == {0: MIB, 1: MIB, 2: -errno.EIO}
        assert device.stats().errors == 1


def test_bandwidth_is_the_servers(tmp_path: Path) -> None:
    """Throttled to 50 MB/s."""
    with (
        StorageDaemon(tmp_path / "disk", tmp_path / "socket", SIZE + superblock.SIZE, **throttled(50e6)),
        contextlib.closing(opened(config(tmp_path))) as device,
    ):
        memory = Memory(MIB)
        before = time.monotonic()
        run(device, [Op(tag, READ, tag * MIB, MIB, [memory.piece(0, MIB)], False) for tag in range(40)])
        assert 20e6 < 40 * MIB / (time.monotonic() - before) < 60e6


# ---- whose drive it is ----


def test_sizes(tmp_path: Path, daemon: StorageDaemon) -> None:
    assert prepare_device(config(tmp_path, size=None), UUID) == SIZE
    assert prepare_device(config(tmp_path, size=8 * MIB), UUID) == 8 * MIB
    with pytest.raises(DeviceError, match=r"has 64.0 MiB, 65.0 MiB are asked for; make `size` smaller"):
        prepare_device(config(tmp_path, size=65 * MIB), UUID)
    memory = host_memory([config(tmp_path)])
    assert memory is not None
    with (
        contextlib.closing(memory),
        pytest.raises(DeviceError, match=r"has 8.0 MiB, 64.0 MiB are asked for; run `forebay pool create`"),
    ):
        open_device(config(tmp_path), pool_uuid=UUID, memory=memory, capacity=SIZE)


def test_wiping(tmp_path: Path, daemon: StorageDaemon) -> None:
    prepare_device(config(tmp_path), UUID)
    with pytest.raises(DeviceError, match="belongs to another pool"):
        SpdkDevice.wipe(config(tmp_path), bytes(16))
    SpdkDevice.wipe(config(tmp_path), UUID)
    assert daemon.file.read_bytes()[: superblock.SIZE] == bytes(superblock.SIZE)
    with pytest.raises(DeviceError, match="is not a forebay device"):
        SpdkDevice.wipe(config(tmp_path), UUID)


def test_what_the_doctor_says(tmp_path: Path, daemon: StorageDaemon) -> None:
    good, bad = config(tmp_path), config(tmp_path, path=tmp_path / "nowhere")
    assert check_drive(good).status == "ok"
    assert "blocks of 512 B" in check_drive(good).found
    assert check_drive(bad).status == "problem"
    assert check_drive(bad).fix.startswith("run `forebay spdk attach`")
    assert check_huge_pages([good]).status == "ok"
    huge = check_huge_pages([config(tmp_path, depth=1024)] * 50)
    assert (huge.status, "as root run" in huge.fix) == ("problem", True)


def test_another_pools_drive(tmp_path: Path, daemon: StorageDaemon) -> None:
    prepare_device(config(tmp_path), UUID)
    with pytest.raises(DeviceError, match="belongs to another pool"):
        prepare_device(config(tmp_path), bytes(16))
    with pytest.raises(DeviceError, match="is device 'nvme0' of this pool"):
        prepare_device(config(tmp_path, name="nvme1"), UUID)


def test_a_drive_with_something_else_on_it(tmp_path: Path, daemon: StorageDaemon) -> None:
    with daemon.file.open("r+b") as file:
        file.seek(1080)
        file.write(b"\x53\xef")
    with pytest.raises(DeviceError, match="contains an ext2, ext3 or ext4 filesystem"):
        prepare_device(config(tmp_path), UUID)


def test_a_socket_that_is_not_there_or_in_use(tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.storage.device.vhost_user.TIMEOUT", 0.5)
    with pytest.raises(DeviceError, match=r"cannot connect .*run `forebay spdk attach`"):
        prepare_device(config(tmp_path, path=tmp_path / "nowhere"), UUID)
    with pytest.raises(DeviceError, match=r"does not answer within .* no other process uses this socket"):
        prepare_device(config(tmp_path), UUID)  # this server has one client
