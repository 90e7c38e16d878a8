"""Attention over segments, against a softmax over all of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.diffusion.attention import Asked, KeyValues, attend, attend_varlen


def plain(queries: torch.Tensor, segments: list[KeyValues]) -> torch.Tensor:
    keys, values = (torch.cat([one[place] for one in segments]).double() for place in (0, 1))
    repeat = queries.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(repeat, 1), values.repeat_interleave(repeat, 1)
    scores = torch.einsum("nhs,mhs->hnm", queries.double(), keys) * queries.shape[2] ** -0.5
    return torch.einsum("hnm,mhs->nhs", scores.softmax(-1), values)


def batch(seed: int, heads: int, kv_heads: int, size: int) -> list[Asked]:
    """Up to 5 requests with up to 3 segments each, some of them shared or empty."""
    random = torch.Generator().manual_seed(seed)

    def number(limit: int) -> int:
        return int(torch.randint(limit, (1,), generator=random))

    def segment(count: int) -> KeyValues:
        return KeyValues(*(torch.randn(count, kv_heads, size, generator=random) * 2 for _ in range(2)))

    shared = [segment(1 + number(40)) for _ in range(2)]
    found = []
    for _ in range(1 + number(5)):
        own = [segment(number(30)) for _ in range(number(2))] + [segment(1 + number(20))]
        chosen = ([shared[number(2)]] if number(2) else []) + own
        found.append(Asked(torch.randn(number(12), heads, size, generator=random), chosen))
    return found


@given(st.integers(0, 999), st.sampled_from([(4, 4, 48), (4, 2, 16), (6, 1, 8)]))
@settings(deadline=None, max_examples=60)
def test_segments_are_as_good_as_one(seed: int, shape: tuple[int, int, int]) -> None:
    asked = batch(seed, *shape)
    for one, found in zip(asked, attend(asked), strict=True):
        expected = plain(one.queries, list(one.segments)) if len(one.queries) else one.queries
        torch.testing.assert_close(found.double(), expected.double(), rtol=1e-4, atol=1e-5)


def packed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seq_q: torch.Tensor, cu_seq_k: torch.Tensor,
    max_q: int, max_k: int, *, return_aux: object, enable_gqa: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """What `varlen_attn` does on a GPU, as its documentation has it; weights by head, as its kernels return them."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert enable_gqa == (query.shape[1] != key.shape[1])
    results, weights = [], []
    for first, last, begin, end in zip(cu_seq_q, cu_seq_q[1:], cu_seq_k, cu_seq_k[1:], strict=False):
        assert last - first <= max_q
        assert end - begin <= max_k
        q, segment = query[first:last], KeyValues(key[begin:end], value[begin:end])
        k = segment.keys.repeat_interleave(q.shape[1] // key.shape[1], 1)
        scores = torch.einsum("nhs,mhs->hnm", q.double(), k.double()) * q.shape[2] ** -0.5
        results.append(plain(q, [segment]).to(q.dtype))
        weights.append(scores.logsumexp(-1).float())
    return torch.cat(results), torch.cat(weights, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(6))
def test_all_segments_in_one_call(monkeypatch: pytest.MonkeyPatch, seed: int, dtype: torch.dtype) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", packed)
    kept: dict[int, KeyValues] = {}

    def convert(pair: KeyValues) -> KeyValues:
        return kept.setdefault(id(pair.keys), KeyValues(pair.keys.to(dtype), pair.values.to(dtype)))

    asked = [Asked(q.to(dtype), [convert(pair) for pair in segments]) for q, segments in batch(seed, 4, 2, 16)]
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for one, found in zip(asked, attend_varlen(asked), strict=True):
        expected = plain(one.queries, list(one.segments)) if len(one.queries) else one.queries
        torch.testing.assert_close(found.double(), expected.double(), **close)
