"""What is loaded of a hit: both sides of the connector on real devices, without an engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forebay.storage.plan import unpack
from forebay.storage.prefill import PrefillCost
from forebay.storage.rates import ReadRates
from forebay.vllm_ext import worth
from forebay.vllm_ext.metadata import JobReport
from forebay.vllm_ext.steps import SAMPLED, StepTimer
from tests.vllm_ext.judgekit import PAGE, TOKENS, Sides, hashes, request

Make = Callable[..., Sides]
SLOW_TO_COMPUTE = 0.01
"""Seconds per token."""


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Sides] = []

    def build(*arguments: Any, **changes: Any) -> Sides:
        made.append(Sides(tmp_path, *arguments, **changes))
        return made[-1]

    yield build
    for sides in made:
        sides.close()


def test_a_fast_device_is_loaded_in_full(make: Make) -> None:
    sides = make()
    sides.store(hashes(8))
    sides.knows(SLOW_TO_COMPUTE)
    question = request("a", hashes(8))
    assert sides.ask(question) == 8 * TOKENS
    sides.tensor.fill_(7)
    assert sides.load(question, 8 * TOKENS) == set()
    assert not sides.tensor[1:9].any()
    assert sides.pool.stats().leases == 0
    assert sides.judge.rates.queued == [0, 0]
    assert sides.metrics["forebay:kv_hits_judged"] == {("loaded",): 1}
    assert sides.metrics["forebay:kv_hit_tokens_loaded"] == {(): 8 * TOKENS}


def test_a_device_that_is_slow_from_the_start_is_found_out_by_one_read(make: Make) -> None:
    sides = make()
    sides.store(hashes(8))
    sides.knows(0.001)
    sides.throttle(1e6)
    assert sides.ask(request("a", hashes(8))) == 0
    sides.hear()
    assert max(sides.judge.bandwidths()) < 4e6
    assert sides.load(request("a", hashes(8)), 0) == set()
    assert sides.metrics["forebay:kv_hits_judged"] == {("computed",): 1}
    assert sides.metrics["forebay:kv_hit_tokens_computed"] == {(): 8 * TOKENS}
    (estimate,) = sides.metrics["forebay:kv_compute_estimate_seconds"][()]
    assert estimate == pytest.approx(8 * TOKENS * 0.001)
    (estimate,) = sides.metrics["forebay:kv_load_estimate_seconds"][()]
    assert estimate > 8 * PAGE / 2 / 4e6


def test_the_end_is_trimmed_where_only_it_is_slow(make: Make) -> None:
    """The first chunks lie on one device, the last on one that is slow."""
    sides = make(placement="hash")
    sides.store(hashes(12))
    sides.knows(0.001)
    devices = [
        {place >> 32 for place in unpack(places)}
        for places, _ in sides.pool.reads([name + bytes(4) for name in hashes(12)])
    ]
    first = next(k for k, found in enumerate(devices) if found == {1})
    sides.faults[1].throttle(1e5)
    question = request("a", hashes(12))
    assert sides.ask(question) == first * TOKENS
    assert sides.load(question, first * TOKENS) == set()
    assert sides.metrics["forebay:kv_hits_judged"] == {("trimmed",): 1}
    assert sides.metrics["forebay:kv_hit_tokens_loaded"] == {(): first * TOKENS}
    assert sides.metrics["forebay:kv_hit_tokens_computed"] == {(): (12 - first) * TOKENS}


def test_a_device_that_grows_slow_under_a_load_costs_no_more_than_computing(make: Make) -> None:
    sides = make()
    sides.store(hashes(16))
    sides.knows(0.001)
    question = request("a", hashes(16))
    assert sides.ask(question) == 16 * TOKENS
    sides.throttle(1e6)
    before = time.monotonic()
    failed = sides.load(question, 16 * TOKENS)
    assert time.monotonic() - before < 16 * TOKENS * 0.001 + 0.5
    assert failed
    stats = sides.pool.stats()
    assert (stats.chunks, stats.leases, stats.failed_loads) == (16, 0, 0), "the chunks are good"
    assert all(report.usable for report in sides.engine.health()), "the devices are slow, not broken"
    assert sides.metrics["forebay:kv_loads_given_up"] == {(): 1}
    assert sides.ask(question) == 0
    assert sides.ask(request("b", hashes(16))) == 0, "others know at once"


def test_who_was_let_down_does_not_ask_again(make: Make) -> None:
    sides = make()
    sides.store(hashes(4))
    sides.knows(0.01)
    question = request("a", hashes(4))
    sides.ask(question)
    sides.throttle(1e5)
    assert sides.load(question, 4 * TOKENS)
    sides.throttle(1e12)
    sides.judge.rates = ReadRates(2)
    assert sides.ask(question) == 0
    assert sides.ask(request("b", hashes(4))) == 4 * TOKENS
    sides.judge.forget(["b"])
    assert sides.judge._given_up == set()


def test_a_device_that_recovers_is_used_again(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    sides = make()
    sides.store(hashes(8))
    sides.knows(0.001)
    sides.throttle(1e6)
    assert sides.ask(request("a", hashes(8))) == 0
    sides.hear()
    sides.throttle(1e12)
    assert sides.ask(request("b", hashes(8))) == 0, "it is too early to ask again"
    monkeypatch.setattr(worth, "PROBE_PERIOD", 0.2)
    time.sleep(0.3)
    assert sides.ask(request("c", hashes(8))) == 0, "nobody waits for a device that was slow"
    sides.hear()
    assert sides.ask(request("d", hashes(8))) == 8 * TOKENS


def test_a_silent_device_is_asked_before_it_is_relied_on(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    sides = make()
    sides.store(hashes(8))
    sides.knows(0.001)
    question = request("a", hashes(8))
    sides.load(question, sides.ask(question))
    sides.throttle(1e6)
    assert sides.ask(request("b", hashes(8))) == 8 * TOKENS, "it was heard of a moment ago"
    monkeypatch.setattr(worth, "PROBE_PERIOD", 0.2)
    time.sleep(0.3)
    assert sides.ask(request("c", hashes(8))) == 0


def test_while_nothing_was_computed_what_loads_within_a_second_is_loaded(make: Make) -> None:
    sides = make()
    sides.store(hashes(16))
    assert sides.ask(request("a", hashes(16))) == 16 * TOKENS
    sides.judge.rates._bandwidths = [1e6, 1e6]
    assert 0 < sides.ask(request("b", hashes(16))) < 16 * TOKENS


def test_always_loads_whatever_it_takes(make: Make) -> None:
    sides = make(load="always")
    sides.store(hashes(4))
    sides.throttle(2e6)
    question = request("a", hashes(4))
    assert sides.ask(question) == 4 * TOKENS
    assert sides.load(question, 4 * TOKENS) == set()


def test_nothing_is_given_up_where_a_failed_load_fails_the_request(make: Make) -> None:
    sides = make(policy="fail")
    sides.store(hashes(4))
    sides.knows(0.001)
    question = request("a", hashes(4))
    assert sides.ask(question) == 4 * TOKENS
    sides.throttle(2e6)
    assert sides.load(question, 4 * TOKENS) == set()


def test_a_trimmed_hit_is_valid_for_windows_too(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Full attention and a window of two blocks. Chunks of the window group are there for some ends only."""
    sides = make((None, 2 * TOKENS))
    names = hashes(12)
    sides.store(names, groups=(0,))
    sides.store(names[2:5] + names[9:12], groups=(1,))
    sides.knows(0.001)
    assert sides.ask(request("a", names)) == 12 * TOKENS
    for device in range(2):
        sides.judge.rates._bandwidths[device] = 0.0
    assert sides.ask(request("b", names)) == 0
    sides.judge.rates._bandwidths = [1e9, 1e9]
    monkeypatch.setattr(worth, "shortest", lambda loading, computing: min(9, len(loading) - 1))
    assert sides.ask(request("c", names)) == 5 * TOKENS, "the longest end within the trim that the window allows"


def test_a_chunk_is_late_only_where_no_rank_found_it_broken() -> None:
    first = JobReport({b"a": "late", b"b": "late", b"c": "EIO"}, {b"a", b"b"})
    first.merge(JobReport({b"b": "EIO", b"d": "late"}, {b"d"}))
    assert set(first.failed) == {b"a", b"b", b"c", b"d"}
    assert first.late == {b"a", b"d"}


def step_of(tokens: dict[str, int]) -> Any:
    return SimpleNamespace(num_scheduled_tokens=tokens)


def prompt_of(tokens: int, computed: int = 0) -> Any:
    return SimpleNamespace(num_prompt_tokens=tokens, num_computed_tokens=computed)


def test_steps_are_timed_from_the_end_of_the_one_before() -> None:
    """Asynchronous scheduling: the second step is planned while the first runs."""
    cost = PrefillCost()
    timer = StepTimer(cost)
    requests = {"a": prompt_of(1000), "b": prompt_of(1000)}
    first = timer.scheduled(step_of({"a": 1000}), requests, 10.0)
    second = timer.scheduled(step_of({"b": 1000}), requests, 10.1)
    assert None not in (first, second)
    timer.ended([first], 11.0)  # type: ignore[list-item]
    assert cost.seconds(0, 1000) == pytest.approx(1.0)
    timer.ended([second], 12.0)  # type: ignore[list-item]
    assert cost.seconds(0, 1000) == pytest.approx(1.0)


def test_steps_that_mostly_decode_are_not_taken_for_prefill() -> None:
    cost = PrefillCost()
    timer = StepTimer(cost)
    requests = {f"d{n}": prompt_of(10, 500) for n in range(64)} | {"p": prompt_of(100, 80)}
    assert timer.scheduled(step_of(dict.fromkeys(requests, 1)), requests, 0.0) is None
    numbers = [timer.scheduled(step_of({"d0": 1}), requests, 0.0) for _ in range(4 * SAMPLED)]
    assert len([number for number in numbers if number is not None]) == 4
    timer.ended([number for number in numbers if number], 5.0)
    assert not cost.known
    assert timer.scheduled(step_of({"unknown": 100}), requests, 0.0) is None
    assert timer.scheduled(step_of({}), requests, 0.0) is None


def test_the_end_of_a_prompt_attends_to_all_before() -> None:
    cost = PrefillCost()
    timer = StepTimer(cost)
    for start in (0, 1000, 2000, 3000):
        number = timer.scheduled(step_of({"a": 1000}), {"a": prompt_of(4000, start)}, 100.0 * start)
        timer.ended([number], 100.0 * start + 1 + start / 1000)  # type: ignore[list-item]
    assert cost.pair_seconds == pytest.approx(1e-6)
    assert cost.token_seconds == pytest.approx(0.0005)
