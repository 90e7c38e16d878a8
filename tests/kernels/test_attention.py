"""The attention kernel of every instruction set that this processor has, against float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from forebay.kernels import _cpu
from forebay.kernels.attention import Segment, attention, readable
from forebay.kernels.cpu import VARIANTS

TOLERANCE = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Relative to the largest value: of sums in float32, and of one rounding to the type."""


@pytest.fixture
def threads() -> Iterator[None]:
    """Restores the number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    source = torch.Generator().manual_seed(hash((seed, *shape)) % 2**31)
    return torch.randn(*shape, generator=source).to(dtype)


def segment(count: int, kv_heads: int, size: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Segment:
    return random(count, kv_heads, size, seed=seed + 1, dtype=dtype), random(
        count, kv_heads, size, seed=seed + 2, dtype=dtype
    )


def expected(queries: Tensor, segments: Sequence[Segment]) -> Tensor:
    keys, values = (torch.cat([pair[place] for pair in segments]).double() for place in (0, 1))
    group = queries.shape[1] // keys.shape[1]
    keys, values = (one.repeat_interleave(group, 1) for one in (keys, values))
    scores = torch.einsum("nqs,mqs->nqm", queries.double(), keys) / queries.shape[-1] ** 0.5
    return torch.einsum("nqm,mqs->nqs", scores.softmax(-1), values)


def check(found: Tensor, queries: Tensor, segments: Sequence[Segment]) -> None:
    exact = expected(queries, segments)
    assert (found.dtype, found.shape, found.is_contiguous()) == (queries.dtype, queries.shape, True)
    if exact.numel():
        assert (found.double() - exact).abs().max() <= TOLERANCE[queries.dtype] * exact.abs().max()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 4, 48), (6, 2, 128), (7, 1, 20), (2, 2, 3)])
def test_equals_float64(heads: int, kv_heads: int, size: int, variant: str, dtype: torch.dtype) -> None:
    for count, *lengths in ((1, 1), (2, 48), (5, 49, 3), (17, 95), (32, 100, 97), (33, 7, 1, 60), (70, 200)):
        queries = random(count, heads, size, dtype=dtype)
        segments = [segment(length, kv_heads, size, place, dtype) for place, length in enumerate(lengths)]
        check(attention([(queries, segments)], variant=variant)[0], queries, segments)


@settings(max_examples=60, deadline=None)
@given(
    askers=st.lists(st.tuples(st.integers(0, 40), st.lists(st.integers(0, 60), min_size=1, max_size=3)), min_size=1),
    variant=st.sampled_from(VARIANTS),
)
def test_every_asker_gets_what_it_gets_alone(askers: list[tuple[int, list[int]]], variant: str) -> None:
    asked = [
        (random(count, 4, 16, seed=number), [segment(1, 2, 16), *(segment(one, 2, 16, number) for one in lengths)])
        for number, (count, lengths) in enumerate(askers)
    ]
    together = attention(asked, variant=variant)
    for found, one in zip(together, asked, strict=True):
        check(found, *one)
        assert torch.equal(found, attention([one], variant=variant)[0])


@pytest.mark.parametrize("variant", VARIANTS)
def test_result_does_not_depend_on_threads_nor_on_other_queries(variant: str, threads: None) -> None:
    queries, segments = random(70, 6, 64), [segment(400, 3, 64), segment(33, 3, 64, 5)]
    torch.set_num_threads(1)
    whole = attention([(queries, segments)], variant=variant)[0]
    for count in (2, 3, 8):
        torch.set_num_threads(count)
        assert torch.equal(attention([(queries, segments)], variant=variant)[0], whole)
        some = attention([(queries[9 : 9 + count], segments)], variant=variant)[0]
        assert torch.equal(some, whole[9 : 9 + count])


@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_that_lie_apart(variant: str) -> None:
    """Queries, keys and values as slices of one projection, and heads that lie first."""
    rows = random(50, 12, 32)
    queries, keys, values = rows[:, :6], rows[:, 6:9], rows[:, 9:]
    check(attention([(queries, [(keys, values)])], variant=variant)[0], queries, [(keys, values)])
    first = [one.transpose(0, 1).contiguous().transpose(0, 1) for one in (queries, keys, values)]
    found = attention([(first[0], [(first[1], first[2])])], variant=variant)[0]
    assert torch.equal(found, attention([(queries, [(keys, values)])], variant=variant)[0])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("scale", [1e-20, 300.0])
def test_products_small_and_large(scale: float, variant: str) -> None:
    """The highest product comes last, so that all sums before are worth nothing."""
    queries, (keys, values) = scale * random(9, 2, 16), segment(150, 2, 16)
    keys[-1] = 50 * queries[0].sign()
    check(attention([(queries, [(keys, values)])], variant=variant)[0], queries, [(keys, values)])


@pytest.mark.parametrize("variant", VARIANTS)
def test_nan_and_infinity_stay_in_their_row_and_head(variant: str) -> None:
    queries, segments = random(12, 4, 16), [segment(70, 2, 16)]
    clean = attention([(queries, segments)], variant=variant)[0]
    queries[3, 1], queries[5, 2, 0] = torch.nan, torch.inf
    found = attention([(queries, segments)], variant=variant)[0]
    changed = ~(found == clean).all(-1)
    assert changed.nonzero().tolist() == [[3, 1], [5, 2]]
    assert found[3, 1].isnan().all()


@pytest.mark.parametrize("change", ["type", "mixed", "stride", "unknown"])
def test_what_the_kernel_does_not_read(change: str) -> None:
    queries, (keys, values) = random(3, 2, 16), segment(9, 2, 16)
    assert readable(queries, [(keys, values)])
    if change == "type":
        queries, keys, values = queries.double(), keys.double(), values.double()
    elif change == "mixed":
        values = values.bfloat16()
    elif change == "stride":
        keys = keys.transpose(1, 2).contiguous().transpose(1, 2)
    else:
        queries = queries.to("meta")
    assert not readable(queries, [(keys, values)])


def test_calls_at_the_same_time() -> None:
    asked = [(random(count, 4, 32), [segment(300, 2, 32, count)]) for count in (1, 30, 64, 128)]
    alone = [attention([one])[0] for one in asked]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda turn: attention([asked[turn % 4]])[0], range(80)))
    assert all(torch.equal(result, alone[turn % 4]) for turn, result in enumerate(found))


@pytest.mark.parametrize(
    "numbers",
    [[1], [0] * 6, [0, 0, 1, 1, 1, 2, *[0] * 7], [0, 0, -1, 1, 1, 1, *[0] * 7], [0, 0, 1, 1, 1, 2**62]],
    ids=str,
)
def test_numbers_that_describe_nothing(numbers: list[int]) -> None:
    with pytest.raises(ValueError, match="not askers"):
        _cpu.attention(VARIANTS[0], 0, 1, (1, 1, 8), numbers)


def test_settings_that_do_not_exist() -> None:
    with pytest.raises(ValueError, match="no attention of element type 3"):
        _cpu.attention(VARIANTS[0], 3, 1, (1, 1, 8), [])
    with pytest.raises(ValueError, match="no kernels of variant sse9"):
        _cpu.attention("sse9", 0, 1, (1, 1, 8), [])
    with pytest.raises(TypeError):
        _cpu.attention(VARIANTS[0], 0, 1, (1, 1, 8), ["1"] * 13)  # type: ignore[list-item]
