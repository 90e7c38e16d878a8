"""The parts of the benchmark on small data: they measure what they say, and a part that cannot run is reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forebay.bench.kv import checksum, single, stripes
from forebay.bench.kv.session import BenchError, Memory2D, Session, keys
from forebay.bench.kv.suite import BARS, KV, PARTS
from forebay.bench.suite import Context, run, select
from forebay.storage.config import load_config
from forebay.storage.errors import ConfigError, ForebayError

MIB = 1 << 20
NAMES = {
    "stripe_vs_sum", "stripe_vs_equal", "stripe_vs_hash", "any_prefix_balance", "single_device_vs_fio",
    "cpu_per_gb_vs_fs_tier", "blocked_vs_fs_tier", "ttft_warm_vs_recompute", "ttft_warm_vs_device_hit",
    "checksum_overhead",
}  # fmt: skip


def context(work: Path, *wanted: str) -> Context:
    work.mkdir(exist_ok=True)
    return Context(work, quick=True, rounds=1, wanted=frozenset(wanted), say=lambda text: None)


def test_every_bar_is_measured_by_exactly_one_part() -> None:
    assert [bar.name for bar in BARS] == [*dict.fromkeys(bar.name for bar in BARS)]
    assert {bar.name for bar in BARS} == NAMES
    assert sorted(name for part in PARTS for name in part.ratios) == sorted(NAMES)


def test_bars_judge_in_their_direction() -> None:
    by_name = {bar.name: bar for bar in BARS}
    assert by_name["stripe_vs_sum"].passed(0.95)
    assert not by_name["stripe_vs_sum"].passed(0.94)
    assert by_name["checksum_overhead"].passed(1.1)
    assert not by_name["checksum_overhead"].passed(1.11)


def test_selection() -> None:
    assert select(KV, []) == NAMES
    assert select(KV, ["ttft", "stripe_vs_sum"]) == {
        "ttft_warm_vs_recompute", "ttft_warm_vs_device_hit", "stripe_vs_sum",
    }  # fmt: skip
    with pytest.raises(ConfigError, match="known names are stripe_vs_sum"):
        select(KV, ["stripes", "everything"])


@pytest.mark.needs("fio")
def test_the_report_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(single, "QUICK_TOTAL", 32 * MIB)
    report = run(KV, tmp_path, quick=True, rounds=1, only=["single"], command="forebay bench kv")
    json.dumps(report)
    assert set(report["ratios"]) == NAMES
    assert report["ratios"]["single_device_vs_fio"] > 0.05
    assert [name for name, value in report["ratios"].items() if value is not None] == ["single_device_vs_fio"]
    assert report["details"]["single"]["bandwidth"]["fio"]["unit"] == "B/s"
    assert report["ok"]
    assert report["errors"] == {}
    assert report["machine"]["kernel"]
    assert list(tmp_path.iterdir()) == []


def test_a_part_that_cannot_run_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(context: Context) -> None:
        raise ForebayError("no such thing here; do something")

    monkeypatch.setattr(single, "measure", refuse)
    monkeypatch.setattr(checksum, "QUICK_TOTAL", 12 * MIB)
    report = run(KV, tmp_path, quick=True, rounds=1, only=["single", "checksum"])
    assert report["errors"] == {"single": "no such thing here; do something"}
    assert report["ratios"]["single_device_vs_fio"] is None
    assert report["ratios"]["checksum_overhead"] is not None
    assert not report["ok"]


def test_a_work_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--work"):
        run(KV, tmp_path / "file", only=["single"])


@pytest.mark.needs("root", "losetup", "fio")
def test_stripes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stripes, "RATES", (48e6, 24e6, 12e6))
    monkeypatch.setattr(stripes, "LONG_RATES", (32e6, 16e6, 8e6))
    monkeypatch.setattr(stripes, "QUICK_PREFIXES", (8,))
    monkeypatch.setattr(stripes, "QUICK_SECONDS", 0.45)
    found = stripes.measure(context(tmp_path, *stripes.PLACEMENT_RATIOS, "any_prefix_balance"))
    assert found.ratios["stripe_vs_sum"] > 0.7
    assert found.ratios["stripe_vs_equal"] > 1.5
    assert found.ratios["stripe_vs_hash"] > 1.2
    assert found.ratios["any_prefix_balance"] < 1.4
    shares = found.details["placements"]["bytes_by_device"]
    assert shares["equal"][0] == pytest.approx(shares["equal"][2], rel=0.1)
    assert shares["bandwidth"][0] / shares["bandwidth"][2] == pytest.approx(4, rel=0.3)


def test_what_the_stripes_need_on_disk() -> None:
    quick, full = stripes.Plan.make(True), stripes.Plan.make(False)
    assert sum(quick.sizes()) < 1.2e9
    assert sum(full.sizes()) < 4e9
    slow = stripes.Plan.make(True, disk=100e6)
    assert sum(slow.rates) == pytest.approx(40e6)
    assert slow.chunks < quick.chunks


def test_checksums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum, "QUICK_TOTAL", 24 * MIB)
    found = checksum.measure(context(tmp_path, "checksum_overhead"))
    assert found.ratios["checksum_overhead"] == max(found.details["by_memory"].values())


@pytest.mark.engine
def test_vllms_tier_and_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    from forebay.bench.kv import fs_tier

    monkeypatch.setattr(fs_tier, "QUICK_TOTAL", 12 * MIB)
    monkeypatch.setattr(fs_tier, "TOTAL", 12 * MIB)
    monkeypatch.setattr(fs_tier, "CHUNKS", (1 * MIB,))
    found = fs_tier.measure(context(tmp_path, "cpu_per_gb_vs_fs_tier", "blocked_vs_fs_tier"))
    details = found.details["chunks of 1 MiB"]
    assert found.ratios["cpu_per_gb_vs_fs_tier"] == details["cpu_ratio"] > 0
    assert set(details["near_best"]) <= set(fs_tier.SETTINGS)
    assert details["settings"]["forebay"]["cpu"]["unit"] == "s/GB"


def test_a_wrong_load_is_noticed(tmp_path: Path) -> None:
    device = {"name": "ssd", "kind": "file", "path": tmp_path / "ssd.kv", "size": "4MiB"}
    config = load_config({"path": tmp_path / "pool", "stripe": "256KiB", "devices": [device]}, env={})
    memory = Memory2D(2, MIB)
    names = keys("swapped", 2)
    with Session(config, memory) as session:
        session.store(names)
        session.load(names, check=True)
        with pytest.raises(BenchError, match="row 0 came back as row 1"):
            session.load(list(reversed(names)), check=True)
        with pytest.raises(BenchError, match="evicted"):
            session.load(keys("unknown", 1))
        with pytest.raises(BenchError, match="make the devices larger"):
            session.store(keys("too many", 9))
