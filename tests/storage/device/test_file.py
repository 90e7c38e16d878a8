"""Files and block devices, through every engine."""

from __future__ import annotations

import errno
import mmap
import multiprocessing
import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

from forebay.storage.config import DeviceConfig
from forebay.storage.device import direct, open_device, prepare_device, superblock
from forebay.storage.device.base import Device, Direction, Op
from forebay.storage.errors import DeviceError
from forebay.storage.testing import DeviceConformance, Memory, run
from tests.storage.device.conftest import Mount

UUID = bytes(range(16))
MIB = 1 << 20


def config(path: Path, **fields: object) -> DeviceConfig:
    return DeviceConfig.model_validate({"name": "ssd0", "kind": "file", "path": path, "size": "64MiB", **fields})


def prepared(path: Path, **fields: object) -> Device:
    prepare_device(config(path, **fields), UUID)
    return open_device(config(path, **fields), pool_uuid=UUID)


class TestUring(DeviceConformance):
    def open(self, folder: Path) -> Device:
        return prepared(folder / "data", engine="io_uring")


class TestShallowUring(DeviceConformance):
    def open(self, folder: Path) -> Device:
        return prepared(folder / "data", engine="io_uring", depth=2)


class TestThreads(DeviceConformance):
    def open(self, folder: Path) -> Device:
        return prepared(folder / "data", engine="threads")


class TestStaged(DeviceConformance):
    """Where memory must be page-aligned, most operations go through staging."""

    def open(self, folder: Path) -> Device:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(direct, "probe", lambda fd: direct.Alignments(4096, 4096, 4096))
            return prepared(folder / "data", engine="io_uring", depth=8)


class TestDirectRefusedLate(DeviceConformance):
    """The probe was too hopeful: what the kernel refuses with EINVAL is done again through staging."""

    @pytest.fixture(params=["io_uring", "threads"], autouse=True)
    def engine(self, request: pytest.FixtureRequest) -> str:
        self.chosen = request.param
        return self.chosen

    def open(self, folder: Path) -> Device:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(direct, "probe", lambda fd: direct.Alignments(512, 512, 1))
            return prepared(folder / "data", engine=self.chosen, depth=8)


class TestBuffered(DeviceConformance):
    """A file system that refuses O_DIRECT."""

    @pytest.fixture(autouse=True)
    def ramfs(self, mount: Mount) -> None:
        self.folder = mount("ramfs")

    def open(self, folder: Path) -> Device:
        return prepared(self.folder / "data", buffered=True)


class TestBlockDevice(DeviceConformance):
    @pytest.fixture(autouse=True)
    def disk(self, loop_device: Path) -> None:
        self.path = loop_device

    def open(self, folder: Path) -> Device:
        return prepared(self.path, size=None)


# ---- what it is on ----


def test_the_largest_request_is_that_of_the_disk(tmp_path: Path, loop_device: Path) -> None:
    limit = int((Path("/sys/block") / loop_device.name / "queue/max_sectors_kb").read_text()) << 10
    raw, file = prepared(loop_device, size=None), prepared(tmp_path / "data")
    assert raw.largest == limit
    assert file.largest >= 1 << 16
    raw.close()
    file.close()


def test_a_folder_on_no_disk_has_a_usual_limit(mount: Mount) -> None:
    device = prepared(mount("ramfs") / "data", buffered=True)
    assert device.largest == MIB
    device.close()


# ---- whose it is ----


def test_content_survives_reopening(tmp_path: Path) -> None:
    memory = Memory(2 * MIB, os.urandom(MIB))
    first = prepared(tmp_path / "data")
    run(first, [Op(1, Direction.WRITE, 0, MIB, [memory.piece(0, MIB)], False)])
    first.flush()
    first.close()
    second = prepared(tmp_path / "data")
    run(second, [Op(1, Direction.READ, 0, MIB, [memory.piece(MIB, MIB)], False)])
    second.close()
    assert memory[:MIB] == memory[MIB:]


def test_preparing_again_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "data"
    assert prepare_device(config(path), UUID) == 64 * MIB
    before = path.read_bytes()
    assert prepare_device(config(path), UUID) == 64 * MIB
    assert path.read_bytes() == before
    assert path.stat().st_blocks * 512 >= 64 * MIB


def test_many_processes_prepare_at_once(tmp_path: Path) -> None:
    with multiprocessing.get_context("fork").Pool(8) as pool:
        sizes = pool.starmap(prepare_device, [(config(tmp_path / "data"), UUID)] * 16)
    assert sizes == [64 * MIB] * 16
    open_device(config(tmp_path / "data"), pool_uuid=UUID).close()


def test_an_interrupted_preparation_is_completed(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(superblock.Superblock(UUID, "ssd0", 64 * MIB).pack())
    with pytest.raises(DeviceError, match=r"has 0 B where 64.0 MiB were allocated; run `forebay pool create`"):
        open_device(config(path), pool_uuid=UUID)
    prepared(path).close()


def test_resizing_keeps_content(tmp_path: Path) -> None:
    path = tmp_path / "data"
    memory = Memory(2 * MIB, os.urandom(MIB))
    device = prepared(path)
    run(device, [Op(1, Direction.WRITE, 0, MIB, [memory.piece(0, MIB)], False)])
    device.close()
    for size in ("80MiB", "32MiB"):
        device = prepared(path, size=size)
        assert device.capacity == config(path, size=size).size
        assert path.stat().st_size == device.capacity + superblock.SIZE
        run(device, [Op(1, Direction.READ, 0, MIB, [memory.piece(MIB, MIB)], False)])
        assert memory[:MIB] == memory[MIB:]
        device.close()


def test_capacity_may_be_less_and_not_more(tmp_path: Path) -> None:
    prepare_device(config(tmp_path / "data"), UUID)
    device = open_device(config(tmp_path / "data"), pool_uuid=UUID, capacity=5 * MIB + 5)
    assert device.capacity == 5 * MIB
    device.close()
    with pytest.raises(DeviceError, match=r"64.0 MiB, 65.0 MiB are asked for"):
        open_device(config(tmp_path / "data"), pool_uuid=UUID, capacity=65 * MIB)


def test_foreign_file(tmp_path: Path) -> None:
    path = tmp_path / "letters"
    path.write_text("dear all")
    with pytest.raises(DeviceError, match=r"exists and is not a forebay device; give another path"):
        prepare_device(config(path), UUID)
    assert path.read_text() == "dear all"
    with pytest.raises(DeviceError, match=r"is not a forebay device"):
        open_device(config(path), pool_uuid=UUID)


def test_other_pool_name_version_and_damage(tmp_path: Path) -> None:
    path = tmp_path / "data"
    prepare_device(config(path), UUID)
    with pytest.raises(DeviceError, match=r"belongs to another pool \(000102.*delete"):
        prepare_device(config(path), bytes(16))
    with pytest.raises(DeviceError, match=r"belongs to another pool"):
        open_device(config(path), pool_uuid=bytes(16))
    with pytest.raises(DeviceError, match=r"is device 'ssd0' of this pool"):
        open_device(config(path, name="ssd1"), pool_uuid=UUID)
    whole = bytearray(path.read_bytes())
    for at, problem in ((8, "format version 254"), (90, "is damaged")):
        damaged = bytearray(whole)
        damaged[at] ^= 255
        path.write_bytes(damaged)
        with pytest.raises(DeviceError, match=problem):
            open_device(config(path), pool_uuid=UUID)


# ---- what cannot be used ----


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("missing/data", "the folder .*missing does not exist; create it"),
        ("", "Is a directory; give the path of a file in it"),
    ],
)
def test_paths_that_cannot_be(tmp_path: Path, name: str, problem: str) -> None:
    with pytest.raises(DeviceError, match=problem):
        prepare_device(config(tmp_path / name), UUID)


def test_not_prepared(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=r"No such file or directory; run `forebay pool create`"):
        open_device(config(tmp_path / "data"), pool_uuid=UUID)


def test_no_size(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=r"is a file without a size; add one"):
        prepare_device(config(tmp_path / "data", size=None), UUID)
    assert not (tmp_path / "data").exists()


@pytest.mark.needs("root")
def test_no_permission(tmp_path: Path) -> None:
    prepare_device(config(tmp_path / "data"), UUID)
    for folder in tmp_path.parents:
        if folder.stat().st_uid == os.geteuid() and folder != Path("/"):
            folder.chmod(0o755)
    os.seteuid(65534)
    try:
        with pytest.raises(DeviceError, match=r"Permission denied; give this user read and write permission"):
            open_device(config(tmp_path / "data"), pool_uuid=UUID)
    finally:
        os.seteuid(0)


def test_read_only(mount: Mount) -> None:
    folder = mount("tmpfs", "ro")
    with pytest.raises(DeviceError, match=r"Read-only file system; remount it read-write"):
        prepare_device(config(folder / "data"), UUID)


def test_disk_full(mount: Mount) -> None:
    folder = mount("tmpfs", "size=16m")
    with pytest.raises(DeviceError, match=r"needs 64.0 MiB, .* are free; make it smaller"):
        prepare_device(config(folder / "data"), UUID)
    assert list(folder.iterdir()) == []
    prepare_device(config(folder / "data", size="8MiB"), UUID)
    with pytest.raises(DeviceError, match=r"make it smaller, or free some space"):
        prepare_device(config(folder / "data"), UUID)
    assert (folder / "data").stat().st_size == 8 * MIB + superblock.SIZE


def test_direct_refused(mount: Mount, caplog: pytest.LogCaptureFixture) -> None:
    path = mount("ramfs") / "data"
    prepare_device(config(path), UUID)
    with pytest.raises(DeviceError, match=r"refuses O_DIRECT; set `buffered: true`"):
        open_device(config(path), pool_uuid=UUID)
    open_device(config(path, buffered=True), pool_uuid=UUID).close()
    assert [record.getMessage() for record in caplog.records] == [
        f"device 'ssd0': {path} refuses O_DIRECT; using the page cache"
    ]


@pytest.mark.parametrize("total", [4096, 65536, 512 << 10, 4 * MIB])
def test_the_probed_alignment_is_true(tmp_path: Path, total: int) -> None:
    """Reads that keep to it are never refused, whatever their size and number of pieces."""
    prepare_device(config(tmp_path / "data"), UUID)
    fd = os.open(tmp_path / "data", os.O_RDONLY | os.O_DIRECT)
    found = direct.probe(fd)
    assert found is not None
    with mmap.mmap(-1, 3 * total + 8192, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        whole = memoryview(memory)
        for start in (found.memory, 3 * found.memory):
            for size in (total, 4096, 16384):
                parts = [whole[start + 2 * at : start + 2 * at + min(size, total)] for at in range(0, total, size)][
                    :1024
                ]
                assert os.preadv(fd, parts, found.offset) == sum(map(len, parts))
                del parts
        whole.release()
    os.close(fd)


# ---- io_uring refused ----

REFUSE_IO_URING = """
    import ctypes, logging, struct, sys
    from forebay.storage.device import open_device
    sys.path.insert(0, {folder!r})
    logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="%(message)s")
    libc = ctypes.CDLL(None, use_errno=True)
    lines = [(0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x00050000 | {code}), (0x06, 0, 0, 0x7FFF0000)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    head = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(lines), ctypes.addressof(program)))
    assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, head, 0, 0) == 0
    import json
    from forebay.storage.config import DeviceConfig
    from forebay.storage.device.base import Direction, Op
    from forebay.storage.testing import Memory, run
    for name in ("a", "b"):
        fields = dict(name=name, kind="file", path={folder!r} + "/" + name, engine={engine!r})
        config = DeviceConfig.model_validate(fields)
        device = open_device(config, pool_uuid=bytes(range(16)))
        memory = Memory(4096)
        assert run(device, [Op(1, Direction.READ, 0, 4096, [memory.piece(0, 4096)], False)])[1].result == 4096
        device.close()
    print("read")
"""


def refused(folder: Path, code: int, engine: str) -> subprocess.CompletedProcess[str]:
    """Two devices opened in a process whose seccomp filter refuses io_uring_setup."""
    for name in ("a", "b"):
        prepare_device(config(folder / name, name=name), UUID)
    script = textwrap.dedent(REFUSE_IO_URING).format(folder=str(folder), code=code, engine=engine)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS])
def test_threads_where_io_uring_is_refused(tmp_path: Path, code: int) -> None:
    done = refused(tmp_path, code, "auto")
    assert done.returncode == 0, done.stderr
    said, last = done.stdout.splitlines()
    assert said.startswith(f"io_uring is refused here ({os.strerror(code)}; Docker's")
    assert last == "read"


def test_io_uring_refused_but_required(tmp_path: Path) -> None:
    done = refused(tmp_path, errno.EPERM, "io_uring")
    assert "DeviceError: device 'a': io_uring is refused (Operation not permitted); allow it" in done.stderr


# ---- little memory that may be pinned ----

LITTLE_MEMLOCK = """
    import os, resource
    import forebay.storage.device.file  # before this user may not read it any more
    from forebay.storage.device import open_device
    from forebay.storage.config import DeviceConfig
    from forebay.storage.device._native import crc32c
    from forebay.storage.device.base import Direction, Op
    from forebay.storage.testing import Memory, run
    config = DeviceConfig.model_validate(dict(name="a", kind="file", path="a"))
    os.setuid(65534)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))
    device = open_device(config, pool_uuid=bytes(range(16)))
    memory = Memory(8 << 20)
    memory[: 4 << 20] = os.urandom(4 << 20)
    print(device.register(memory.address, 8 << 20))
    for shift in (0, 1):
        run(device, [Op(1, Direction.WRITE, 0, 3 << 20, [memory.piece(shift, 3 << 20)], False)])
        done = run(device, [Op(2, Direction.READ, 0, 3 << 20, [memory.piece((4 << 20) + shift, 3 << 20)], True)])
        assert done[2].checksum == crc32c(memory[shift : shift + (3 << 20)])
        assert memory[(4 << 20) + shift : (7 << 20) + shift] == memory[shift : shift + (3 << 20)]
    device.close()
"""


@pytest.mark.needs("root")
def test_little_memlock_costs_speed_alone() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        prepare_device(config(folder / "a", name="a"), UUID)
        (folder / "a").chmod(0o666)
        script = textwrap.dedent(LITTLE_MEMLOCK)
        done = subprocess.run([sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("False\n", 0), done.stderr


# ---- block devices ----


def test_block_device_content_is_safe(loop_device: Path) -> None:
    subprocess.run(["mkfs.ext4", "-q", loop_device], check=True)
    with pytest.raises(DeviceError, match=r"contains an ext2, ext3 or ext4 filesystem; run `wipefs"):
        prepare_device(config(loop_device), UUID)


def test_block_device_in_use(loop_device: Path, tmp_path: Path) -> None:
    subprocess.run(["mkfs.ext4", "-q", loop_device], check=True)
    folder = tmp_path / "mounted"
    folder.mkdir()
    subprocess.run(["mount", loop_device, folder], check=True)
    try:
        with pytest.raises(DeviceError, match=r"is in use"):
            prepare_device(config(loop_device), UUID)
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize(("offset", "magic"), [(510, b"\x55\xaa"), (512, b"EFI PART"), ((80 << 20) - 512, b"EFI PART")])
def test_block_device_with_partition_table(loop_device: Path, offset: int, magic: bytes) -> None:
    with loop_device.open("r+b") as disk:
        disk.seek(offset)
        disk.write(magic)
    with pytest.raises(DeviceError, match=r"contains .* partition table"):
        prepare_device(config(loop_device), UUID)


def test_block_device_sizes(loop_device: Path) -> None:
    assert prepare_device(config(loop_device, size=None), UUID) == 80 * MIB - superblock.SIZE
    assert prepare_device(config(loop_device), UUID) == 64 * MIB
    with pytest.raises(DeviceError, match=r"is more than the 80.0 MiB of .*leave size out"):
        prepare_device(config(loop_device, size="81MiB"), UUID)


def test_block_device_of_another_pool(loop_device: Path) -> None:
    prepare_device(config(loop_device), UUID)
    with pytest.raises(DeviceError, match=r"belongs to another pool.*dd if=/dev/zero"):
        prepare_device(config(loop_device), bytes(16))
