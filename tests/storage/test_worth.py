"""How much of a hit is loaded: against brute force, and what has to hold whatever the numbers."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from forebay.storage.plan import ChunkReads, Span, pack
from forebay.storage.worth import OVERHEAD, cumulate, load_seconds, shortest, within

MIB = 1 << 20


class Case(NamedTuple):
    """A hit of some chunks on some devices."""

    loads: list[list[int]]
    computes: list[float]
    queued: list[int]
    bandwidths: list[float]

    def total(self, kept: int) -> float:
        """The time to first token, written down anew."""
        times = [
            (ahead + count) / bandwidth if bandwidth else math.inf
            for count, ahead, bandwidth in zip(self.loads[kept], self.queued, self.bandwidths, strict=True)
            if count
        ]
        return (max(times) + OVERHEAD if times else 0.0) + self.computes[kept]

    def choose(self) -> int:
        loading = [load_seconds(load, self.queued, self.bandwidths) for load in self.loads]
        return shortest(loading, self.computes)

    def faster(self, factor: float) -> Case:
        return self._replace(bandwidths=[bandwidth * factor for bandwidth in self.bandwidths])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    devices = draw(st.integers(1, 4))
    chunks = draw(st.integers(0, 12))
    sizes = [[draw(st.integers(0, 8 * MIB)) for _ in range(devices)] for _ in range(chunks)]
    loads = list(
        accumulate(sizes, lambda total, new: [a + b for a, b in zip(total, new, strict=True)], initial=[0] * devices)
    )
    costs = [draw(st.floats(0, 0.5)) for _ in range(chunks)]
    computes = list(accumulate(reversed(costs), initial=draw(st.floats(0, 0.5))))[::-1]
    queued = [draw(st.integers(0, 16 * MIB)) for _ in range(devices)]
    bandwidths = [draw(st.just(0.0) | st.floats(1e6, 1e10)) for _ in range(devices)]
    return Case(loads, computes, queued, bandwidths)


@given(cases())
def test_as_brute_force_over_all_trims(case: Case) -> None:
    kept = case.choose()
    best = min(case.total(k) for k in range(len(case.loads)))
    assert case.total(kept) == best
    assert all(case.total(k) > best for k in range(kept + 1, len(case.loads)))


@given(cases())
def test_never_worse_than_without_the_pool_and_no_chunk_more_than_wins(case: Case) -> None:
    kept = case.choose()
    assert case.total(kept) <= case.computes[0]
    assert all(case.total(kept) <= case.total(fewer) for fewer in range(kept))


@given(cases(), st.floats(1, 100))
def test_faster_devices_load_no_less(case: Case, factor: float) -> None:
    """Where two lengths are equally good up to rounding, either may be chosen: compared with a hair's margin."""
    slow, fast = case.choose(), case.faster(factor)
    kept = fast.choose()
    assert kept >= slow or fast.total(kept) >= fast.total(slow) * (1 - 1e-12)


@given(cases(), st.data())
def test_a_faster_device_never_makes_it_slower(case: Case, data: st.DataObject) -> None:
    device = data.draw(st.integers(0, len(case.bandwidths) - 1))
    faster = list(case.bandwidths)
    faster[device] *= data.draw(st.floats(1, 100))
    better = case._replace(bandwidths=faster)
    assert better.total(better.choose()) <= case.total(case.choose())


@given(cases())
def test_nothing_is_loaded_from_devices_without_bandwidth(case: Case) -> None:
    stopped = case._replace(bandwidths=[0.0] * len(case.bandwidths))
    assert not any(stopped.loads[stopped.choose()])


@given(cases(), st.integers(1, 1 << 40))
def test_a_queue_loads_no_more(case: Case, more: int) -> None:
    """One device: with several, a queue at one may make room at none."""
    one = Case([load[:1] for load in case.loads], case.computes, case.queued[:1], case.bandwidths[:1])
    kept = one._replace(queued=[one.queued[0] + more]).choose()
    assert not any(one.loads[kept]) or kept <= one.choose()


def test_what_peers_report_is_computed() -> None:
    """40 s to load, 0.9 s to compute; and the other way round."""
    loads = [[chunk * MIB] for chunk in range(41)]
    computes = [0.9 * (1 - chunk / 41) for chunk in range(41)]
    assert Case(loads, computes, [0], [MIB]).choose() == 0
    assert Case(loads, computes, [0], [1e10]).choose() == 40


def test_attention_makes_the_end_dearer_so_it_is_the_beginning_that_is_computed_or_nothing() -> None:
    """A prefix is all that can be loaded: where only its end is worth loading, all of it is or none."""
    ends = list(range(0, 11))
    computes = [(100 - end * end) / 100 for end in ends]
    loads = [[end * MIB] for end in ends]
    assert Case(loads, computes, [0], [MIB / 0.09]).choose() == 10
    assert Case(loads, computes, [0], [MIB / 0.11]).choose() == 0


def test_the_tail_on_a_slow_device_is_trimmed() -> None:
    loads = [[min(chunk, 6) * MIB, max(0, chunk - 6) * MIB] for chunk in range(11)]
    computes = [0.1 * (10 - chunk) for chunk in range(11)]
    assert Case(loads, computes, [0, 0], [1e9, 1e6]).choose() == 6


def test_a_load_takes_as_long_as_its_slowest_device() -> None:
    assert load_seconds([10, 10], [0, 90], [10, 50]) == 2 + OVERHEAD
    assert load_seconds([10, 0], [0, 90], [10, 0]) == 1 + OVERHEAD
    assert load_seconds([0, 0], [5, 5], [1, 1]) == 0
    assert load_seconds([1], [0], [0]) == math.inf


def test_while_nothing_was_measured_what_loads_in_time_is_loaded() -> None:
    assert within([0.0, 0.4, 0.9, 1.1, 1.5], 1.0) == 2
    assert within([0.0, math.inf], 1.0) == 0
    assert within([0.0, 0.1, 0.2], 1.0) == 2


def test_bytes_add_up_by_device() -> None:
    def chunk(*devices: int) -> ChunkReads:
        return pack([device << 32 | 7 for device in devices]), tuple(Span(0, 10 + device) for device in devices)

    chunks = [chunk(0, 1), chunk(1), (b"", ()), chunk(0, 0, 1)]
    assert cumulate(chunks, [4, 0, 2, 2], 2) == {0: [0, 0], 2: [10, 22], 4: [30, 33]}
