"""`forebay bench kv` and `forebay calibrate` as a user runs them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def test_calibrate(forebay: Callable[..., Any], tmp_path: Path) -> None:
    outcome = forebay("calibrate", "pool.yaml", "--seconds", "0.05", "--json")
    assert outcome.code == 0
    assert set(outcome.data["devices"]) == {"ram0", "ssd0"}
    assert outcome.data["together_vs_alone"] > 0
    assert (tmp_path / "state" / "profile.json").exists()
    table = forebay("calibrate", "pool.yaml", "--seconds", "0.05", "--no-writes")
    assert table.code == 0
    assert "ssd0" in table.out
    assert "stored in" in table.err


def test_calibrate_without_a_pool_is_one_line(forebay: Callable[..., Any]) -> None:
    outcome = forebay("calibrate", "missing.yaml")
    assert outcome.code == 2
    assert len(outcome.err.strip().splitlines()) == 1


def test_an_unknown_ratio_is_one_line(forebay: Callable[..., Any]) -> None:
    outcome = forebay("bench", "kv", "--only", "speed")
    assert outcome.code == 2
    assert "known names are" in outcome.err


@pytest.mark.needs("fio")
def test_bench_writes_what_it_measured(forebay: Callable[..., Any], tmp_path: Path) -> None:
    outcome = forebay(
        "bench", "kv", "--quick", "--rounds", "1", "--only", "single", "--json", "b.json", "--plot", "b.png"
    )
    assert outcome.code == 0, outcome.err
    assert "single_device_vs_fio" in outcome.out
    report = json.loads((tmp_path / "b.json").read_text())
    assert report["ratios"]["single_device_vs_fio"] > 0
    assert report["command"].startswith("forebay bench kv --quick")
    assert (tmp_path / "b.png").stat().st_size > 1000


def test_a_trace_is_replayed_and_simulated(forebay: Callable[..., Any], tmp_path: Path) -> None:
    lines = [
        {"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [0, 1]},
        {"timestamp": 9, "input_length": 1500, "output_length": 1, "hash_ids": [0, 1, 2]},
    ]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, lines)))
    replay = forebay("bench", "kv", "--trace", "t.jsonl", "--capacity", "64MiB", "--json", "-")
    assert replay.code == 0, replay.err
    assert replay.data["hit_rate_blocks"] == pytest.approx(2 / 5)
    assert sum(replay.data["loaded_bytes_by_device"].values()) == 2 << 20
    table = forebay("bench", "kv", "--trace", "t.jsonl", "--no-io", "--plot", "hits.png")
    assert table.code == 0, table.err
    assert "40.0%" in table.out
    assert (tmp_path / "hits.png").exists()
    own = forebay("bench", "kv", "--trace", "t.jsonl", "--pool", "pool.yaml", "--kv-bytes-per-token", "1KiB")
    assert own.code == 0, own.err
    assert "hit rate" in own.out
    wrong = forebay("bench", "kv", "--trace", "t.jsonl", "--capacity", "lots")
    assert wrong.code == 2
    assert "--capacity" in wrong.err
