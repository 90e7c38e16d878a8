"""Slots: never twice, never beyond the bound, and in runs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from forebay.storage.space import Space

CAPACITY = 40


class SpaceMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.space = Space(CAPACITY)
        self.held = []

    @rule(count=st.integers(1, 12))
    def allocate(self, count):
        if count > self.space.free:
            with pytest.raises(ValueError, match=f"{count} slots asked for"):
                self.space.allocate(count)
            return
        slots = self.space.allocate(count)
        assert len(slots) == count
        assert not set(slots) & {slot for run in self.held for slot in run}
        self.held.append(slots)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data):
        self.space.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @rule()
    def reopen(self):
        used = np.array([slot for run in self.held for slot in run], np.int64)
        self.space = Space(CAPACITY, used)

    @invariant()
    def counts(self):
        held = [slot for run in self.held for slot in run]
        assert all(0 <= slot < CAPACITY for slot in held)
        assert len(set(held)) == len(held) == self.space.used
        assert self.space.free == CAPACITY - len(held)

    @invariant()
    def runs_are_maximal(self):
        """What is free is one run wherever it is adjacent: an equal request gets neighbours if there are any."""
        free = sorted(set(range(CAPACITY)) - {slot for run in self.held for slot in run})
        runs = sum(1 for i, slot in enumerate(free) if i == 0 or free[i - 1] != slot - 1)
        assert len(self.space._by_start) == runs


TestSpace = SpaceMachine.TestCase


def test_runs_are_contiguous_and_ascending():
    space = Space(1000)
    runs = [space.allocate(7) for _ in range(100)]
    assert all(run == list(range(run[0], run[0] + 7)) for run in runs)
    for run in runs[::2]:
        space.release(run)
    again = [space.allocate(7) for _ in range(50)]
    assert all(run == list(range(run[0], run[0] + 7)) for run in again)


def test_fragments_are_used_to_the_last_slot():
    space = Space(10)
    slots = space.allocate(10)
    space.release(slots[1::2])
    assert sorted(space.allocate(5)) == slots[1::2]
    assert space.free == 0


@given(st.sets(st.integers(0, 99)))
def test_recovered_space_has_the_rest(used):
    space = Space(100, np.array(sorted(used), np.int64))
    assert set(space.allocate(space.free)) == set(range(100)) - used


def test_ten_million_slots_cost_nothing_up_front():
    space = Space(10_000_000)
    assert space.allocate(6) == list(range(6))
    assert len(space._by_start) == 1


def test_empty_device():
    space = Space(0)
    assert space.free == 0
    with pytest.raises(ValueError, match="1 slots asked for, 0 of 0"):
        space.allocate(1)
