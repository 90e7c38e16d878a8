"""Every prefix of what is written must be read back at the speed of all devices together."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.storage.placement import Bandwidth, Equal, PlacementState, ideal_time
from forebay.storage.plan import Span, cut_spans

STRIPE = 64
bandwidths = st.lists(st.floats(1, 50), min_size=1, max_size=5)
PLENTY = 10**9


def equal_spans(count):
    return tuple(Span(i * STRIPE, STRIPE) for i in range(count))


def run(chunks, weights, free=None, latencies=None, placement=None):
    """The devices of all stripes of `chunks` (tuples of spans), chunk after chunk."""
    free = [PLENTY] * len(weights) if free is None else list(free)
    state = PlacementState(list(latencies or [0.0] * len(weights)))
    chosen = []
    for spans in chunks:
        devices = (placement or Bandwidth()).assign(b"", spans, weights, free, state)
        for device in devices:
            free[device] -= 1
        chosen.append(devices)
    return chosen


def times(chunks, chosen, weights, latencies=None):
    """max_d (l_d + n_d / B_d) after each chunk."""
    taken = [0] * len(weights)
    result = []
    for spans, devices in zip(chunks, chosen):
        for span, device in zip(spans, devices):
            taken[device] += span.length
        lags = latencies or [0.0] * len(weights)
        result.append(max(lag + n / w for lag, n, w in zip(lags, taken, weights) if n))
    return result


@given(bandwidths, st.lists(st.integers(1, 7), min_size=1, max_size=40))
def test_every_prefix_is_within_a_stripe_of_the_ideal(weights, sizes):
    chunks = [equal_spans(size) for size in sizes]
    total = 0
    for spans, time in zip(chunks, times(chunks, run(chunks, weights), weights)):
        total += sum(span.length for span in spans)
        assert time <= ideal_time(total, weights) + STRIPE / min(weights) + 1e-6


@settings(max_examples=60)
@given(
    st.lists(st.floats(1, 20), min_size=2, max_size=3),
    st.integers(1, 8),
    st.lists(st.floats(0, 20), min_size=3, max_size=3),
)
def test_no_other_choice_is_faster_for_any_prefix(weights, count, lags):
    lags = lags[: len(weights)]
    chunks = [equal_spans(1)] * count
    for prefix, time in enumerate(times(chunks, run(chunks, weights, latencies=lags), weights, lags), 1):
        best = min(
            max(lag + n * STRIPE / w for lag, n, w in zip(lags, split, weights) if n)
            for split in itertools.product(range(prefix + 1), repeat=len(weights))
            if sum(split) == prefix
        )
        assert time == pytest.approx(best)


@given(bandwidths, st.lists(st.integers(1, 2000), min_size=1, max_size=30), st.integers(1, 4))
def test_byte_exact_with_short_stripes(weights, sizes, groups):
    """Chunks whose last stripe is short, cut into layer groups: still balanced, by bytes."""
    chunks = [cut_spans([size] * groups, STRIPE, 8) for size in sizes]
    total = 0
    for spans, time in zip(chunks, times(chunks, run(chunks, weights), weights)):
        total += sum(span.length for span in spans)
        assert time <= ideal_time(total, weights) + 2 * STRIPE / min(weights) + 1e-6


@given(
    st.lists(st.tuples(st.one_of(st.just(0.0), st.floats(1, 50)), st.integers(0, 30)), min_size=1, max_size=5),
    st.lists(st.integers(1, 9), max_size=20),
    st.sampled_from([Bandwidth(), Equal()]),
)
def test_never_exceeds_free_and_refuses_only_what_does_not_fit(table, sizes, placement):
    weights, free = (list(column) for column in zip(*table))
    state = PlacementState([0.0] * len(weights))
    for size in sizes:
        room = sum(n for w, n in zip(weights, free) if w > 0)
        before = list(state.work)
        devices = placement.assign(b"", equal_spans(size), weights, free, state)
        if size > room:
            assert devices is None
            assert state.work == before
            continue
        assert len(devices) == size
        for device in devices:
            assert weights[device] > 0
            free[device] -= 1
        assert min(free) >= 0


@given(bandwidths, st.lists(st.integers(1, 9), min_size=1, max_size=20))
def test_stripes_of_one_device_lie_side_by_side(weights, sizes):
    for devices in run([equal_spans(size) for size in sizes], weights):
        assert devices == sorted(devices)


def test_full_device_leaves_its_share_to_the_others():
    chunks = [equal_spans(7)] * 10
    chosen = run(chunks, [4.0, 2.0, 1.0], free=[10, PLENTY, PLENTY])
    counts = [sum(devices.count(d) for devices in chosen) for d in range(3)]
    assert counts == [10, 40, 20]


def test_device_that_comes_back_is_not_flooded():
    state = PlacementState([0.0, 0.0])
    place = Bandwidth().assign
    free = [PLENTY, PLENTY]
    for _ in range(100):
        place(b"", equal_spans(4), [1.0, 0.0], free, state)
    devices = place(b"", equal_spans(8), [1.0, 1.0], free, state)
    assert devices.count(1) <= 5


def test_state_stays_small():
    state = PlacementState([0.0, 0.0, 0.0])
    for _ in range(5000):
        Bandwidth().assign(b"", equal_spans(3), [4.0, 2.0, 1.0], [PLENTY] * 3, state)
    assert max(state.work) <= 2 * STRIPE / 1.0


def test_slow_device_waits_for_its_latency():
    chunks = [equal_spans(1)] * 20
    chosen = [devices[0] for devices in run(chunks, [64.0, 64.0], latencies=[0.0, 10.0])]
    assert chosen[:10] == [0] * 10
    assert set(chosen[10:]) == {0, 1}


def test_equal_ignores_bandwidth():
    chosen = run([equal_spans(6)] * 4, [4.0, 2.0, 1.0], placement=Equal())
    assert [sum(devices.count(d) for devices in chosen) for d in range(3)] == [8, 8, 8]
