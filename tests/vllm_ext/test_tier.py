"""The pool as a secondary tier, driven through vLLM's own interface without an engine."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob

from forebay.bench.kv.tiers import forebay_tier, offload_keys
from forebay.vllm_ext.tier import ForebayTier

ROWS, ROW = 16, 300_000
CONTEXT = ReqContext("request")


class Primary:
    """vLLM's CPU tier, as a tier sees it: rows of equal length."""

    def __init__(self) -> None:
        self.rows = np.zeros((ROWS, ROW), dtype=np.int8)
        self.rows[:] = np.frombuffer(os.urandom(ROWS * ROW), dtype=np.int8).reshape(ROWS, ROW)

    def view(self) -> memoryview:
        return memoryview(self.rows)


def pool(folder: Path) -> dict[str, Any]:
    devices = [
        {"name": "ssd0", "kind": "file", "path": str(folder / "ssd0.kv"), "size": "16MiB", "buffered": True},
        {"name": "ssd1", "kind": "file", "path": str(folder / "ssd1.kv"), "size": "16MiB", "buffered": True},
    ]
    return {"path": str(folder / "state"), "stripe": "64KiB", "devices": devices}


def run(tier: ForebayTier, number: int, keys: list[OffloadKey], rows: list[int], *, load: bool) -> JobResult:
    job = TransferJob(number, keys, np.array(rows), load, CONTEXT)
    (tier.submit_load if load else tier.submit_store)(job)
    end = time.monotonic() + 20
    while time.monotonic() < end:
        for result in tier.get_finished_jobs():
            assert result.job_id == number
            return result
    raise AssertionError("the job did not end")


@pytest.fixture
def primary() -> Primary:
    return Primary()


@pytest.fixture
def tier(tmp_path: Path, primary: Primary) -> Iterator[ForebayTier]:
    tier = forebay_tier(primary, pool(tmp_path))  # type: ignore[arg-type] - rows and a view are all it reads
    yield tier
    tier.shutdown()


def test_rows_come_back_elsewhere(tier: ForebayTier, primary: Primary) -> None:
    keys = offload_keys("k", 6)
    assert tier.lookup(keys[0], CONTEXT) is LookupResult.MISS
    assert run(tier, 1, keys, list(range(6)), load=False).success
    assert all(tier.lookup(key, CONTEXT) is LookupResult.HIT for key in keys)
    before = primary.rows.copy()
    result = run(tier, 2, keys, list(range(8, 14)), load=True)
    assert result.success
    assert result.transfer_bytes == 6 * ROW
    assert np.array_equal(primary.rows[8:14], before[:6])
    assert np.array_equal(primary.rows[:8], before[:8])
    assert np.array_equal(primary.rows[14:], before[14:])


def test_being_written_is_asked_again(tier: ForebayTier) -> None:
    keys = offload_keys("k", 2)
    tier.submit_store(TransferJob(1, keys, np.array([0, 1]), False, CONTEXT))
    assert tier.lookup(keys[0], CONTEXT) is LookupResult.RETRY
    assert tier.has_pending_work()
    tier.drain_jobs()
    (result,) = tier.get_finished_jobs()
    assert result.success
    assert tier.lookup(keys[0], CONTEXT) is LookupResult.HIT
    assert not tier.has_pending_work()


def test_missing_keys_fail_alone(tier: ForebayTier) -> None:
    keys = offload_keys("k", 2)
    run(tier, 1, keys[:1], [0], load=False)
    result = run(tier, 2, keys, [4, 5], load=True)
    assert not result.success
    assert list(result.successful_keys or ()) == keys[:1]


def test_corruption_fails_and_is_a_miss_afterwards(tier: ForebayTier, tmp_path: Path) -> None:
    keys = offload_keys("k", 4)
    run(tier, 1, keys, [0, 1, 2, 3], load=False)
    with (tmp_path / "ssd0.kv").open("r+b") as file:
        file.seek(4096 + 1000)
        file.write(b"\xff" * 64)
        os.fsync(file.fileno())
    result = run(tier, 2, keys, [8, 9, 10, 11], load=True)
    assert not result.success
    failed = [key for key in keys if key not in (result.successful_keys or ())]
    assert len(failed) == 1
    assert tier.lookup(failed[0], CONTEXT) is LookupResult.MISS


def test_warm_after_a_restart(tmp_path: Path, primary: Primary) -> None:
    keys = offload_keys("k", 3)
    first = forebay_tier(primary, pool(tmp_path))  # type: ignore[arg-type]
    run(first, 1, keys, [0, 1, 2], load=False)
    first.shutdown()
    second = forebay_tier(primary, pool(tmp_path))  # type: ignore[arg-type]
    assert run(second, 1, keys, [5, 6, 7], load=True).success
    assert np.array_equal(primary.rows[5:8], primary.rows[:3])
    second.shutdown()
