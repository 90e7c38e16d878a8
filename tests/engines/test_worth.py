"""Behind a real engine: a slow device costs nothing, a fast one is used, and a change is noticed."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from tests.engines.harness import BLOCK
from tests.engines.isolated import run_isolated
from tests.engines.worth_scripts import BLOCKS

pytestmark = pytest.mark.engine


def test_a_slow_device_is_never_worse_than_none(tmp_path: Path) -> None:
    found = run_isolated("slow_device", {"folder": str(tmp_path)}, module="worth_scripts")
    without = statistics.median(answer["ttft"] for answer in found["without"])
    assert [answer["cached"] for answer in found["fast"]] == [BLOCKS * BLOCK] * len(found["fast"])
    assert statistics.median(answer["ttft"] for answer in found["fast"]) < without / 2
    for answer in [*found["slow"], found["slow from the start"], found["grown slow"], found["asked again"]]:
        assert answer["cached"] == 0
    assert statistics.median(answer["ttft"] for answer in found["slow"]) < 2 * without
    assert found["slow from the start"]["ttft"] < 2 * without + 0.5
    assert found["grown slow"]["ttft"] < 4 * without + 0.5, "twice as long, were the machine quiet"
    assert found["fast again"]["cached"] == BLOCKS * BLOCK
    answers = [found["cold"], *found["fast"], *found["without"], *found["slow"]]
    answers += [found[name] for name in ("grown slow", "slow from the start", "asked again", "fast again")]
    assert len({tuple(answer["answer"]) for answer in answers}) == 1
    assert (found["leases"], found["failed loads"]) == (0, 0)
