"""The placements we compare with."""

from hypothesis import given
from hypothesis import strategies as st

from forebay.storage.placement import PLACEMENTS, PlacementState, make_placement
from forebay.storage.plan import Span

SPANS = tuple(Span(i * 64, 64) for i in range(4))


def assign(name, key, weights, free):
    return make_placement(name).assign(key, SPANS, weights, free, PlacementState([0.0] * len(weights)))


def test_hash_keeps_a_chunk_whole_and_spreads_keys():
    keys = [bytes([i]) * 8 for i in range(64)]
    chosen = [assign("hash", key, [1.0, 9.0, 2.0], [99] * 3) for key in keys]
    assert all(len(set(devices)) == 1 for devices in chosen)
    assert {devices[0] for devices in chosen} == {0, 1, 2}
    assert chosen == [assign("hash", key, [1.0, 9.0, 2.0], [99] * 3) for key in keys]


def test_tiered_fills_in_order():
    assert assign("tiered", b"k", [1.0, 2.0], [4, 99]) == [0] * 4
    assert assign("tiered", b"k", [1.0, 2.0], [3, 99]) == [1] * 4
    assert assign("tiered", b"k", [1.0, 2.0], [3, 1]) == [0, 0, 0, 1]
    assert assign("tiered", b"k", [0.0, 2.0], [99, 99]) == [1] * 4


def test_single_uses_the_first_usable_device():
    assert assign("single", b"k", [1.0, 2.0], [4, 99]) == [0] * 4
    assert assign("single", b"k", [0.0, 2.0], [4, 99]) == [1] * 4
    assert assign("single", b"k", [1.0, 2.0], [3, 99]) is None


@given(
    st.sampled_from(sorted(PLACEMENTS)),
    st.binary(max_size=8),
    st.lists(st.tuples(st.sampled_from([0.0, 1.0, 3.0]), st.integers(0, 6)), min_size=1, max_size=4),
)
def test_all_stay_within_free_and_eligible(name, key, table):
    weights, free = (list(column) for column in zip(*table))
    placement = make_placement(name)
    devices = placement.assign(key, SPANS, weights, free, PlacementState([0.0] * len(weights)))
    eligible = placement.eligible(key, weights)
    if devices is None:
        assert sum(free[d] for d in eligible) < len(SPANS)
        return
    assert len(devices) == len(SPANS)
    assert set(devices) <= set(eligible)
    assert all(weights[d] > 0 and devices.count(d) <= free[d] for d in devices)
