"""Both workers move the right pages between tensors and real devices, whatever the groups and the chunk size."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor, GPULoadStoreSpec

from forebay.bench.storage_daemon import StorageDaemon
from forebay.storage.config import PoolConfig
from forebay.storage.lanes import open_lane
from forebay.storage.namespace import Namespace
from forebay.storage.plan import TransferResult
from forebay.storage.pool import Pool
from forebay.vllm_ext import staging
from forebay.vllm_ext.layout import ChunkLayout
from forebay.vllm_ext.metadata import ForebayLoadSpec, ForebayStoreSpec
from forebay.vllm_ext.staging import StagedWorker
from forebay.vllm_ext.worker import ForebayWorker
from tests.storage.device.vhost import huge_pages

BLOCKS, PAGE, LAYERS = 24, 12_288, 3


class Rig:
    """A pool, a worker and the KV tensors of two groups that alias the same memory, as vLLM's hybrid models do."""

    def __init__(self, folder: Path, kind: type[ForebayWorker], blocks_per_chunk: int, drive: dict[str, Any]) -> None:
        devices = [{"name": "ram", "kind": "dram", "size": "4MiB", "huge_pages": False}, {"name": "ssd", **drive}]
        config = PoolConfig.model_validate({"path": folder / "state", "stripe": "16KiB", "devices": devices})
        self.pool = Pool.open(config, Namespace(model="m", weights="w", dtype="d", layout="l"))
        self.tensors = [torch.randint(-128, 128, (BLOCKS, PAGE), dtype=torch.int8) for _ in range(LAYERS)]
        refs = [CanonicalKVCacheRef(index, PAGE) for index in range(LAYERS)]
        kv = CanonicalKVCaches([CanonicalKVCacheTensor(t, PAGE) for t in self.tensors], [refs, refs[:2]])
        self.worker = kind(
            open_lane(config, staging=staging.STAGING_BYTES), kv, ChunkLayout(kv, [0, 7], blocks_per_chunk)
        )
        self.segments = (LAYERS * PAGE * blocks_per_chunk,)

    def finish(self, job: int) -> TransferResult:
        end = time.monotonic() + 20
        while time.monotonic() < end:
            for result in self.worker.take_results():
                assert result.transfer == job
                return result
            time.sleep(0.001)
        raise AssertionError("the job did not end")

    def store(self, job: int, keys: dict[bytes, int], blocks: list[int], **where: Any) -> TransferResult:
        plans = self.pool.prepare_store(list(keys), self.segments)
        spec = ForebayStoreSpec(plans, [keys[plan.key] for plan in plans])
        assert self.worker.submit_store(job, GPULoadStoreSpec(blocks, **where), spec)
        result = self.finish(job)
        self.pool.complete_store({key: [lane] for key, lane in result.checksums.items()}, result.failed)
        return result

    def load(self, job: int, keys: dict[bytes, int], blocks: list[int], **where: Any) -> TransferResult:
        plans = {plan.key: plan for plan in self.pool.prepare_load(list(keys))}
        spec = ForebayLoadSpec(list(keys), list(keys.values()), plans)
        assert self.worker.submit_load(job, spec, GPULoadStoreSpec(blocks, **where))
        result = self.finish(job)
        self.pool.complete_load(list(keys), result.failed)
        return result


@pytest.fixture(params=[ForebayWorker, StagedWorker], ids=["direct", "staged"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[ForebayWorker]:
    monkeypatch.setattr(staging, "STAGING_BYTES", 200_000)
    worker: type[ForebayWorker] = request.param
    return worker


@pytest.fixture(params=["file", pytest.param("spdk", marks=pytest.mark.needs("root", "qemu-storage-daemon"))])
def drive(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """A file, or a drive behind QEMU's storage daemon."""
    if request.param == "file":
        yield {"kind": "file", "size": "16MiB", "path": tmp_path / "ssd.kv", "buffered": True}
        return
    with huge_pages(24), StorageDaemon(tmp_path / "disk", tmp_path / "socket", 20 << 20):
        yield {"kind": "spdk", "path": tmp_path / "socket", "depth": 8}


@pytest.fixture
def make(tmp_path: Path, kind: type[ForebayWorker], drive: dict[str, Any]) -> Iterator[Any]:
    rigs: list[Rig] = []

    def build(blocks_per_chunk: int) -> Rig:
        rigs.append(Rig(tmp_path, kind, blocks_per_chunk, drive))
        return rigs[-1]

    yield build
    for rig in rigs:
        rig.worker.shutdown()
        rig.pool.close()


def test_blocks_come_back_in_other_places(make: Any) -> None:
    rig = make(1)
    keys = {b"k%d" % index: 0 for index in range(8)}
    stored = rig.store(1, keys, list(range(8)), group_sizes=[8, 0], block_indices=[0, 0])
    assert len(stored.checksums) == 8
    before = [tensor.clone() for tensor in rig.tensors]
    loaded = rig.load(2, keys, list(range(15, 23)), group_sizes=[8, 0], block_indices=[0, 0])
    assert not loaded.failed
    assert not rig.worker.failed_blocks(loaded)
    for old, new in zip(before, rig.tensors, strict=True):
        assert torch.equal(new[15:23], old[:8])
        assert torch.equal(new[:15], old[:15])
        assert torch.equal(new[23:], old[23:])


def test_two_groups_of_different_size(make: Any) -> None:
    """The second group has fewer layers: its chunks are padded, and its third layer is never touched."""
    rig = make(1)
    keys = {b"a0": 0, b"a1": 0, b"b0": 7}
    rig.store(1, keys, [3, 4, 5], group_sizes=[2, 1], block_indices=[0, 0])
    before = [tensor.clone() for tensor in rig.tensors]
    assert not rig.load(2, keys, [10, 11, 12], group_sizes=[2, 1], block_indices=[0, 0]).failed
    for layer, (old, new) in enumerate(zip(before, rig.tensors, strict=True)):
        assert torch.equal(new[10:12], old[3:5])
        assert torch.equal(new[12], old[5] if layer < 2 else old[12])


def test_part_of_a_chunk(make: Any) -> None:
    """Chunks of two blocks, of which the first is there already and the last is not wanted."""
    rig = make(2)
    keys = {b"c0": 0, b"c1": 0}
    rig.store(1, keys, [0, 1, 2, 3], group_sizes=[4, 0], block_indices=[0, 0])
    before = [tensor.clone() for tensor in rig.tensors]
    assert not rig.load(2, keys, [20, 21], group_sizes=[2, 0], block_indices=[1, 0]).failed
    for old, new in zip(before, rig.tensors, strict=True):
        assert torch.equal(new[20], old[1])
        assert torch.equal(new[21], old[2])
        assert torch.equal(new[:20], old[:20])


def test_missing_keys_fail_with_their_blocks(make: Any) -> None:
    rig = make(1)
    rig.store(1, {b"here": 0}, [0], group_sizes=[1, 0], block_indices=[0, 0])
    result = rig.load(2, {b"here": 0, b"gone": 0}, [10, 11], group_sizes=[2, 0], block_indices=[0, 0])
    assert result.failed == {b"gone": "no longer in the pool"}
    assert rig.worker.failed_blocks(result) == {11}


def test_a_rank_with_more_bytes_than_the_pool_expects_fails_softly(make: Any) -> None:
    rig = make(1)
    rig.segments = (PAGE,)
    stored = rig.store(1, {b"k": 0}, [0], group_sizes=[1, 0], block_indices=[0, 0])
    assert "bytes on this rank" in stored.failed[b"k"]


def test_waiting_lets_go_of_the_blocks(make: Any) -> None:
    rig = make(1)
    keys = {b"w%d" % index: 0 for index in range(12)}
    plans = rig.pool.prepare_store(list(keys), rig.segments)
    source = GPULoadStoreSpec(list(range(12)), group_sizes=[12, 0], block_indices=[0, 0])
    assert rig.worker.submit_store(5, source, ForebayStoreSpec(plans, [0] * 12))
    rig.worker.wait({5})
    for tensor in rig.tensors:
        tensor.zero_()
    result = rig.finish(5)
    rig.pool.complete_store({key: [lane] for key, lane in result.checksums.items()}, result.failed)
    kept = {key: 0 for key in keys if key in result.checksums}
    loaded = rig.load(6, kept, list(range(len(kept))), group_sizes=[len(kept), 0], block_indices=[0, 0])
    assert not loaded.failed
    assert all(bool(tensor[: len(kept)].any()) for tensor in rig.tensors if kept)
