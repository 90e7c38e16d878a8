"""One pool, several worker processes' worth of engines."""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path

import pytest

from forebay.storage.config import PoolConfig
from forebay.storage.errors import DeviceError, PoolError
from forebay.storage.lanes import check_paths, open_lane, pool_uuid
from forebay.storage.plan import Extent, LoadPlan, StorePlan, cut_spans

CHUNK = 150_000


def config(folder: Path, **changes: object) -> PoolConfig:
    devices = [
        {"name": "ram", "kind": "dram", "size": "4MiB", "huge_pages": False},
        {"name": "ssd", "kind": "file", "size": "4MiB", "path": folder / "ssd.kv", "buffered": True},
    ]
    return PoolConfig.model_validate({"path": folder / "state", "stripe": "64KiB", "devices": devices, **changes})


def address(data: bytearray) -> list[tuple[int, int]]:
    return [(ctypes.addressof(ctypes.c_char.from_buffer(data)), len(data))]


def test_replicated_layouts_share_memory_and_files(tmp_path: Path) -> None:
    """One lane: what one rank stores, every rank loads, from memory as well."""
    writer, reader = (open_lane(config(tmp_path), shared_memory=True) for _ in range(2))
    spans = cut_spans([CHUNK], 64 * 1024)
    extents = tuple(Extent(index % 2, 5 + index) for index in range(len(spans)))
    data, target = bytearray(os.urandom(CHUNK)), bytearray(CHUNK)
    writer.submit_store(1, [(StorePlan(b"k", spans, extents, (None,) * len(spans), 1), address(data))])
    (stored,) = writer.wait([1])
    reader.submit_load(2, [(LoadPlan.of(b"k", spans, extents, (stored.checksums[b"k"],), True), address(target))])
    (loaded,) = reader.wait([2])
    assert not loaded.failed
    assert target == data
    writer.close()
    reader.close()


def test_the_first_process_names_the_pool(tmp_path: Path) -> None:
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(pool_uuid(config(tmp_path)))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1


def test_a_broken_name_is_an_error_with_a_fix(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "uuid").write_text("not a uuid\n")
    with pytest.raises(PoolError, match="forebay pool clear"):
        pool_uuid(config(tmp_path))


def test_paths_are_checked_before_anything_starts(tmp_path: Path) -> None:
    check_paths(config(tmp_path))
    missing = [{"name": "s", "kind": "file", "size": "4MiB", "path": tmp_path / "no" / "s.kv"}]
    with pytest.raises(DeviceError, match=r"'s'.*no does not exist; create it"):
        check_paths(config(tmp_path, devices=missing))
    absent = [{"name": "s", "kind": "file", "path": "/dev/no-such-device"}]
    with pytest.raises(DeviceError, match="lsblk"):
        check_paths(config(tmp_path, devices=absent))
