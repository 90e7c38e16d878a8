"""The cost of computing a prompt, learned from steps."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.storage.prefill import HALF_LIFE, PrefillCost, pairs

TOKEN, PAIR, OVERHEAD = 1e-4, 2e-8, 0.01


def truth(start: int, end: int) -> float:
    return (end - start) * TOKEN + pairs(start, end) * PAIR


def feed(cost: PrefillCost, start: int, end: int, factor: float = 1.0) -> None:
    cost.observe(end - start, pairs(start, end), (truth(start, end) + OVERHEAD) * factor)


def test_nothing_is_known_at_first() -> None:
    cost = PrefillCost()
    assert not cost.known
    assert cost.seconds(0, 1000) == 0
    cost.observe_empty(0.01)
    assert not cost.known


def test_both_terms_are_found_from_one_prompt_in_pieces() -> None:
    cost = PrefillCost()
    cost.observe_empty(OVERHEAD)
    for start in range(0, 16384, 2048):
        feed(cost, start, start + 2048)
    assert cost.token_seconds == pytest.approx(TOKEN)
    assert cost.pair_seconds == pytest.approx(PAIR)
    assert cost.seconds(30000, 50000) == pytest.approx(truth(30000, 50000))


def test_one_length_says_nothing_of_attention_and_is_right_for_that_length() -> None:
    cost = PrefillCost()
    cost.observe_empty(OVERHEAD)
    for _ in range(5):
        feed(cost, 0, 2000)
    assert cost.pair_seconds == 0
    assert cost.seconds(0, 2000) == pytest.approx(truth(0, 2000))


def test_overhead_learned_later_counts_from_the_beginning() -> None:
    early, late = PrefillCost(), PrefillCost()
    early.observe_empty(OVERHEAD)
    for cost in (early, late):
        for start in (0, 500, 1000):
            feed(cost, start, start + 500)
    late.observe_empty(OVERHEAD)
    assert late.seconds(0, 5000) == pytest.approx(early.seconds(0, 5000))


def test_small_steps_do_not_drown_a_large_one() -> None:
    """A restarted engine whose prompts are warm computes their last tokens only."""
    cost = PrefillCost()
    feed(cost, 0, 4096)
    for _ in range(200):
        cost.observe(16, pairs(4096, 4112), OVERHEAD)
    assert cost.seconds(0, 4096) < 1.5 * truth(0, 4096)


def test_small_steps_alone_do_not_make_computing_look_dear() -> None:
    cost = PrefillCost()
    for _ in range(20):
        cost.observe(20, pairs(4000, 4020), OVERHEAD + truth(4000, 4020))
        cost.observe_empty(OVERHEAD)
    assert cost.seconds(0, 4000) < 2 * truth(0, 4000)
    assert cost.seconds(0, 4000) > 0


def test_the_past_is_forgotten() -> None:
    cost = PrefillCost()
    for _ in range(20):
        feed(cost, 0, 2048, factor=10)
    for _ in range(12 * HALF_LIFE // 2048):
        feed(cost, 0, 2048)
    assert cost.seconds(0, 2048) == pytest.approx(truth(0, 2048) + OVERHEAD, rel=0.01)


@given(
    st.lists(st.tuples(st.integers(1, 8192), st.integers(0, 100_000), st.floats(1e-6, 100)), min_size=1, max_size=20)
)
def test_never_negative_and_finite_whatever_was_seen(steps: list[tuple[int, int, float]]) -> None:
    cost = PrefillCost()
    for tokens, start, seconds in steps:
        cost.observe(tokens, pairs(start, start + tokens), seconds)
        cost.observe_empty(seconds / 2)
    assert cost.token_seconds >= 0
    assert cost.pair_seconds >= 0
    assert 0 < cost.seconds(0, 1000) < float("inf")
    assert cost.seconds(0, 2000) >= cost.seconds(0, 1000)


def test_noise_averages_out() -> None:
    dice, cost = random.Random(3), PrefillCost()
    cost.observe_empty(OVERHEAD)
    for _ in range(200):
        start = 512 * dice.randrange(64)
        feed(cost, start, start + 512, factor=dice.uniform(0.8, 1.2))
    assert cost.seconds(0, 16384) == pytest.approx(truth(0, 16384), rel=0.25)


@pytest.mark.parametrize(("tokens", "seconds"), [(0, 1.0), (10, 0.0), (10, float("inf")), (10, float("nan"))])
def test_nonsense_is_ignored(tokens: int, seconds: float) -> None:
    cost = PrefillCost()
    cost.observe(tokens, 1.0, seconds)
    assert not cost.known
