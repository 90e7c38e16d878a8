"""The ideal time against a bisection and against every integer split."""

import itertools
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.storage.placement import ideal_shares, ideal_time

rates = st.floats(0.5, 100)
devices = st.lists(
    st.tuples(st.one_of(st.just(0.0), rates), st.floats(0, 5), st.one_of(st.just(inf), st.floats(0, 500))),
    min_size=1,
    max_size=6,
)


def delivered(time, bandwidths, latencies, capacities):
    return sum(
        min(capacity, bandwidth * max(0.0, time - latency))
        for bandwidth, latency, capacity in zip(bandwidths, latencies, capacities)
        if bandwidth > 0
    )


@given(devices, st.floats(0, 1))
def test_is_when_all_bytes_can_have_arrived(table, fraction):
    bandwidths, latencies, capacities = (list(column) for column in zip(*table))
    room = sum(c for b, c in zip(bandwidths, capacities) if b > 0)
    size = fraction * min(room, 1000.0)
    time = ideal_time(size, bandwidths, latencies, capacities)
    assert delivered(time + 1e-6, bandwidths, latencies, capacities) >= size - 1e-3
    if size > 0:
        assert delivered(time - 1e-6, bandwidths, latencies, capacities) <= size + 1e-3


@given(devices, st.floats(0.01, 1))
def test_shares_add_up_and_finish_together(table, fraction):
    bandwidths, latencies, capacities = (list(column) for column in zip(*table))
    room = sum(c for b, c in zip(bandwidths, capacities) if b > 0)
    size = fraction * min(room, 1000.0)
    shares = ideal_shares(size, bandwidths, latencies, capacities)
    time = ideal_time(size, bandwidths, latencies, capacities)
    assert sum(shares) == pytest.approx(size, abs=1e-3)
    for share, bandwidth, latency, capacity in zip(shares, bandwidths, latencies, capacities):
        assert 0 <= share <= capacity
        if share > 0:
            assert latency + share / bandwidth <= time + 1e-6


@given(
    st.lists(rates, min_size=1, max_size=3), st.integers(1, 12), st.lists(st.integers(1, 12), min_size=3, max_size=3)
)
def test_no_integer_split_is_faster(bandwidths, size, capacities):
    capacities = capacities[: len(bandwidths)]
    if sum(capacities) < size:
        with pytest.raises(ValueError, match="do not fit"):
            ideal_time(size, bandwidths, None, capacities)
        return
    splits = (s for s in itertools.product(*(range(c + 1) for c in capacities)) if sum(s) == size)
    best = min(max(n / b for n, b in zip(split, bandwidths)) for split in splits)
    assert ideal_time(size, bandwidths, None, capacities) <= best + 1e-9


def test_closed_form():
    assert ideal_time(700, [400, 200, 100]) == pytest.approx(1.0)
    assert ideal_time(700, [400, 200, 100], [0.1, 0.1, 0.1]) == pytest.approx(1.1)
    assert ideal_time(10, [400, 200, 100], [0.0, 5.0, 5.0]) == pytest.approx(10 / 400)
    assert ideal_shares(700, [400, 200, 100]) == pytest.approx([400, 200, 100])
    assert ideal_shares(700, [400, 200, 100], None, [100, inf, inf]) == pytest.approx([100, 400, 200])
    assert ideal_time(0, [1.0]) == 0.0


def test_empty_and_unusable_devices():
    with pytest.raises(ValueError, match="do not fit"):
        ideal_time(1, [0.0, 0.0])
    assert ideal_shares(10, [0.0, 2.0]) == [0.0, 10.0]
