"""Rounds: every arm once per round, in a turning order."""

from __future__ import annotations

from forebay.bench.rounds import Series, interleave


def test_every_arm_runs_once_per_round_and_the_order_turns() -> None:
    seen: list[str] = []
    results = interleave({"a": lambda: 1, "b": lambda: 2, "c": lambda: 3}, 3, seen.append)
    assert "".join(seen) == "abcbcacab"
    assert results == {"a": [1] * 3, "b": [2] * 3, "c": [3] * 3}


def test_median_and_spread() -> None:
    series = Series.of([3.0, 1.0, 2.0], "s")
    assert series.median == 2.0
    assert series.spread == 1.0
    assert series.to_json() == {"median": 2.0, "spread": 1.0, "unit": "s", "rounds": [3.0, 1.0, 2.0]}
