"""How fast devices are now, as their loads tell."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.storage.rates import ReadRates
from forebay.storage.worth import OVERHEAD

MB = 1_000_000
PROFILE = [1e9, 5e8]


def load(rates: ReadRates, name: object, count: int, seconds: float, arrived: int | None = None) -> None:
    """One load from device 0, alone."""
    rates.start(name, {0: count})
    rates.finish(name, {0: count if arrived is None else arrived}, {0: seconds}, PROFILE, 7.0)


def test_the_profile_holds_until_something_was_seen() -> None:
    rates = ReadRates(2)
    assert rates.bandwidths(PROFILE) == PROFILE
    assert rates.seen(0) is None
    load(rates, "a", 100 * MB, 1.0 + OVERHEAD)
    assert rates.bandwidths(PROFILE) == [pytest.approx(1e8, rel=0.01), 5e8]
    assert rates.seen(0) == 7.0
    assert rates.seen(1) is None


def test_a_slow_load_is_believed_at_once_and_a_fast_one_as_well() -> None:
    rates = ReadRates(2)
    load(rates, "slow", 10 * MB, 10.0)
    assert rates.bandwidths(PROFILE)[0] == pytest.approx(1e6, rel=0.01)
    load(rates, "fast", 1000 * MB, 0.5)
    assert rates.bandwidths(PROFILE)[0] == pytest.approx(2e9, rel=0.02)


def test_a_short_load_upsets_nothing() -> None:
    """Mostly latency: a third of a millisecond for 128 KiB is 0.4 GB/s, but the device may be faster."""
    rates = ReadRates(2)
    load(rates, "long", 2000 * MB, 1.0)
    before = rates.bandwidths(PROFILE)[0]
    load(rates, "short", 131072, 0.0003)
    assert rates.bandwidths(PROFILE)[0] == before


def test_one_fast_read_gives_a_recovered_device_its_profile_back() -> None:
    rates = ReadRates(2)
    load(rates, "slow", 10 * MB, 10.0)
    load(rates, "probe", 131072, 0.0003)
    assert rates.bandwidths(PROFILE)[0] == PROFILE[0]


def test_a_probe_that_was_given_up_says_how_fast_the_device_is_at_most() -> None:
    rates = ReadRates(2)
    load(rates, "probe", 131072, 0.05, arrived=0)
    assert rates.bandwidths(PROFILE)[0] == pytest.approx(131072 / (0.05 - OVERHEAD))
    load(rates, "slow", 10 * MB, 10.0)
    load(rates, "probe", 131072, 0.05, arrived=0)
    assert rates.bandwidths(PROFILE)[0] == pytest.approx(1e6, rel=0.01), "what is known and possible stays"


def test_a_load_that_was_given_up_tells_by_what_came() -> None:
    rates = ReadRates(2)
    load(rates, "half", 100 * MB, 2.0, arrived=4 * MB)
    assert rates.bandwidths(PROFILE)[0] == pytest.approx(2e6, rel=0.01)


def test_loads_that_overlap_do_not_make_a_device_look_slow() -> None:
    """Two loads share 1 GB/s; each takes 0.2 s for its 100 MB."""
    rates = ReadRates(2)
    for name in "ab":
        rates.start(name, {0: 100 * MB})
    assert rates.queued == [200 * MB, 0]
    for name in "ab":
        rates.finish(name, {0: 100 * MB}, {0: 0.2}, PROFILE, 0.0)
        assert rates.bandwidths(PROFILE)[0] == PROFILE[0]
    assert rates.queued == [0, 0]


def test_only_the_first_rank_counts_and_unknown_loads_are_ignored() -> None:
    rates = ReadRates(2)
    load(rates, "a", 100 * MB, 1.0)
    before = rates.bandwidths(PROFILE)
    rates.finish("a", {0: 1}, {0: 100.0}, PROFILE, 9.0)
    assert (rates.bandwidths(PROFILE), rates.seen(0)) == (before, 7.0)


def test_dropped_and_cleared_loads_leave_no_queue() -> None:
    rates = ReadRates(2)
    rates.start("a", {0: 5, 1: 6})
    rates.start("b", {1: 1})
    rates.drop("a")
    assert rates.queued == [0, 1]
    rates.clear()
    assert rates.queued == [0, 0]
    rates.finish("b", {1: 1}, {1: 1.0}, PROFILE, 0.0)
    assert rates.queued == [0, 0]
    assert rates.seen(1) is None


@given(
    st.floats(1e6, 2e10),
    st.lists(st.integers(1 << 10, 1 << 32), min_size=1, max_size=12),
    st.floats(0, OVERHEAD),
)
def test_the_truth_is_never_ruled_out(bandwidth: float, sizes: list[int], latency: float) -> None:
    """Loads one after the other on a device of that bandwidth: the estimate is what it can be, given the last load."""
    rates = ReadRates(1)
    for number, size in enumerate(sizes):
        seconds = latency + size / bandwidth
        rates.start(number, {0: size})
        rates.finish(number, {0: size}, {0: seconds}, [1e9], 0.0)
        most = size / (seconds - OVERHEAD) if seconds > OVERHEAD else math.inf
        assert size / seconds * 0.999 <= rates.bandwidths([1e9])[0] <= most * 1.001
    if sizes[-1] / bandwidth > 100 * OVERHEAD:
        assert rates.bandwidths([1e9])[0] == pytest.approx(bandwidth, rel=0.02)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 1 << 30), st.booleans()), max_size=40))
def test_queues_are_the_sum_of_what_is_out(events: list[tuple[int, int, bool]]) -> None:
    rates, out = ReadRates(1), dict[int, int]()
    for name, size, begins in events:
        if begins:
            rates.start(name, {0: size})
            out[name] = size
        else:
            rates.finish(name, {0: size}, {0: 0.1}, [1e9], 0.0)
            out.pop(name, None)
        assert rates.queued == [sum(out.values())]
