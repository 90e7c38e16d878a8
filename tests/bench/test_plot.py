"""Pictures are drawn from reports."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay.bench import plot
from forebay.bench.kv.suite import BARS

PNG = b"\x89PNG"


def report(ratios: dict[str, float | None]) -> dict[str, object]:
    bars = {bar.name: {"bar": bar.text, "limit": bar.limit, "at_least": bar.at_least, "passed": True} for bar in BARS}
    return {"benchmark": "kv", "ratios": ratios, "bars": bars}


def test_bars(tmp_path: Path) -> None:
    ratios: dict[str, float | None] = {bar.name: bar.limit * 1.2 for bar in BARS} | {"stripe_vs_sum": None}
    plot.plot_bars(report(ratios), tmp_path / "bars.png")
    assert (tmp_path / "bars.png").read_bytes().startswith(PNG)


def test_hit_rates(tmp_path: Path) -> None:
    rows = [{"policy": p, "capacity_bytes": 2**n, "hit_rate_blocks": 0.1} for p in ("lru", "s3fifo") for n in (30, 31)]
    report = {"results": rows, "repeated_blocks": 0.3, "kv_bytes_per_token": 1024, "trace": "t", "requests": 1}
    plot.plot_hit_rates(report, tmp_path / "hits.png")
    assert (tmp_path / "hits.png").read_bytes().startswith(PNG)


def test_replay(tmp_path: Path) -> None:
    report = {"load_latency_seconds": {}, "loaded_bytes_by_device": {"a": 1}, "trace": "t", "hit_rate_blocks": 0.5}
    plot.plot_replay(report, tmp_path / "replay.png")
    assert (tmp_path / "replay.png").read_bytes().startswith(PNG)


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(plot.PlotError, match="--plot"):
        plot.plot_bars(report(dict.fromkeys((bar.name for bar in BARS), 1.0)), tmp_path / "no" / "bars.png")
    with pytest.raises(plot.PlotError, match="--plot"):
        plot.plot_bars(report(dict.fromkeys((bar.name for bar in BARS), 1.0)), tmp_path / "bars.xyz")
