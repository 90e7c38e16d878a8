"""States of prefixes in bounded memory, against a plain model of the cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from forebay.diffusion.cache import PrefixCache
from forebay.diffusion.prefix import PrefixStates
from forebay.diffusion.transformer import Transformer
from forebay.diffusion.weights import load

MODEL = Path(__file__).parents[2] / "tests/assets/tinydlm-prefix"
TRANSFORMER = Transformer(load(MODEL))
PER_TOKEN = 192 * 4 * (3 * 2 + 1)
"""Bytes of three layers' keys and values and one state."""


def prefix(number: int) -> torch.Tensor:
    """Prefix 3 begins with prefix 2, which begins with prefix 1, and so on."""
    return torch.arange(100, 102 + number)


def cache(tokens: int) -> PrefixCache:
    return PrefixCache(TRANSFORMER, tokens * PER_TOKEN)


def test_states_are_computed_once_and_shared() -> None:
    mine = cache(100)
    first, second = mine.acquire(prefix(5), 2), mine.acquire(prefix(5).clone(), 2)
    assert first is second
    assert (mine.statistics.hits, mine.statistics.misses) == (1, 1)
    assert mine.bytes == first.bytes == 7 * PER_TOKEN


def test_a_prefix_of_a_prefix_is_another() -> None:
    mine = cache(100)
    longer, shorter = mine.acquire(prefix(8), 2), mine.acquire(prefix(3), 2)
    assert len(shorter.tokens_P) == 5
    assert not torch.allclose(longer.known[1].keys[:5], shorter.known[1].keys, rtol=1e-2, atol=1e-2)
    again = PrefixStates(prefix(3))
    again.deepen(TRANSFORMER, 2)
    assert torch.equal(again.states[2], shorter.states[2])


def test_states_in_use_outlive_the_limit() -> None:
    mine = cache(10)
    held = mine.acquire(prefix(6), 2)
    mine.release(mine.acquire(prefix(5), 2))
    assert prefix(6) in mine
    assert prefix(5) not in mine
    mine.release(held)
    assert mine.bytes == 8 * PER_TOKEN


def test_releasing_what_was_not_acquired() -> None:
    with pytest.raises(KeyError):
        cache(10).release(PrefixStates(prefix(1)))


class CacheMachine(RuleBasedStateMachine):
    """Requests come and go at random."""

    LIMIT = 30

    def __init__(self) -> None:
        super().__init__()
        self.cache = cache(self.LIMIT)
        self.order: list[int] = []
        self.held: list[tuple[int, PrefixStates]] = []

    def expect(self) -> None:
        used = {number for number, _ in self.held}
        for number in list(self.order):
            if sum(one + 2 for one in self.order) <= self.LIMIT:
                break
            if number not in used:
                self.order.remove(number)

    @rule(number=st.integers(0, 12))
    def come(self, number: int) -> None:
        states = self.cache.acquire(prefix(number), 2)
        assert torch.equal(states.tokens_P, prefix(number))
        if number in self.order:
            self.order.remove(number)
        self.order.append(number)
        self.held.append((number, states))
        self.expect()

    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        if self.held:
            _, states = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
            self.cache.release(states)
            self.expect()

    @invariant()
    def same(self) -> None:
        assert len(self.cache) == len(self.order)
        assert all(prefix(number) in self.cache for number in self.order)
        assert self.cache.bytes == sum(number + 2 for number in self.order) * PER_TOKEN


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=20, stateful_step_count=25, deadline=None)
