"""Which rows are computed when, and that reuse within a request is what it is said to be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from forebay.diffusion.decoding import DecodingSettings, DiffusionRequest, advance
from forebay.diffusion.passes import STRETCH, safe_depth
from forebay.diffusion.prefix import PrefixStates
from forebay.diffusion.transformer import Join, Rows, Transformer
from forebay.diffusion.weights import load
from tests.diffusion.naive import Naive

MODEL = Path(__file__).parents[2] / "tests/assets/tinydlm-prefix"
MASK, LAYERS = 1, 6


@pytest.fixture(scope="module")
def transformer() -> Transformer:
    return Transformer(load(MODEL))


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(5, 4096, (count,), generator=torch.Generator().manual_seed(seed))


def request(transformer: Transformer, ids: torch.Tensor, prefix: int, depth: int, **changes) -> DiffusionRequest:
    audit, tau = changes.pop("audit", False), changes.pop("tau", 0.97)
    states = PrefixStates(ids[:prefix])
    states.deepen(transformer, depth)
    settings = DecodingSettings(**{"length": 16, "steps": 16, "block": 8, "ignore_end": True, **changes})
    return DiffusionRequest(transformer, states, depth, ids[prefix:], settings, audit=audit, tau=tau)


def run(transformer: Transformer, one: DiffusionRequest) -> list[Rows]:
    """To the end; what each pass computed."""
    found = []
    while not one.done:
        found.append(one.rows())
        advance(transformer, [one])
    return found


def joins(passes: list[Rows]) -> list[int]:
    """The passes in which the prefix is computed anew."""
    return [number for number, rows in enumerate(passes) if isinstance(rows.prefix, Join)]


@pytest.mark.parametrize(("refresh", "expected"), [(1, list(range(16))), (5, [0, 5, 10, 15]), (16, [0]), (0, [0, 8])])
def test_refreshes_come_at_intervals(transformer: Transformer, refresh: int, expected: list[int]) -> None:
    one = request(transformer, tokens(30), 20, 2, refresh=refresh)
    passes = run(transformer, one)
    assert joins(passes) == expected
    assert one.passes.counts.refreshes == len(expected)
    assert all(rows.prefix.layer == 2 for rows in passes if isinstance(rows.prefix, Join))


def test_a_refresh_starts_from_the_prefix_alone(transformer: Transformer) -> None:
    one = request(transformer, tokens(30), 20, 2, refresh=3)
    states = one.passes.states
    before = [pair.keys.clone() for pair in states.known], states.states[2].clone()
    for rows in run(transformer, one):
        if isinstance(rows.prefix, Join):
            assert rows.prefix.state_PD is states.states[2]
    assert all(torch.equal(pair.keys, old) for pair, old in zip(states.known, before[0], strict=True))
    assert torch.equal(states.states[2], before[1])


@pytest.mark.parametrize(
    ("cache", "later", "places"), [("none", 26, 20), ("prefix", 16, 30), ("dual", 8, 30), ("prefix", 8, 38)]
)
def test_rows_within_a_block(transformer: Transformer, cache: str, later: int, places: int) -> None:
    """26 rows behind a prefix of 20, two blocks of 8: all at a block's begin, then those the cache does not hold."""
    passes = run(transformer, request(transformer, tokens(30), 20, 1, block_cache=cache, refresh=16))
    block = 1 if places == 38 else 0
    assert len(passes[8 * block].tokens_N) == 26
    for rows in passes[8 * block + 1 : 8 * block + 8]:
        assert len(rows.tokens_N) == later
        assert int(rows.positions_N[0]) == places


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_fast_dllm_by_its_definition(transformer: Transformer, cache: str, shifted: bool) -> None:
    """As plainly as it can be written: outside of the block, keys and values are those of the block's first pass."""
    weights = transformer.weights
    transformer = Transformer(replace(weights, config=replace(weights.config, shifted=shifted)))
    ids, naive = tokens(30, 5), Naive(MODEL)
    one = request(transformer, ids, 20, 0, block_cache=cache, refresh=0)
    run(transformer, one)
    everything = torch.cat([ids, torch.full((16,), MASK)])
    for first in (30, 38):
        old = everything.clone()
        for _ in range(8):
            fresh = range(first - shifted, first + 8 if cache == "dual" else 46)
            logits = mixed(naive, old, everything, list(fresh))
            logits = torch.cat([logits[:1], logits[:-1]]) if shifted else logits
            sure, best = logits.index_fill(-1, torch.tensor([MASK]), -torch.inf).softmax(-1).max(-1)
            masked = [place for place in range(first, first + 8) if everything[place] == MASK]
            place = max(masked, key=lambda place: float(sure[place]))
            everything[place] = best[place]
    assert torch.equal(one.answer, everything[30:])


def mixed(naive: Naive, old: torch.Tensor, new: torch.Tensor, fresh: list[int]) -> torch.Tensor:
    """Logits where only the rows `fresh` are of the new tokens, against keys and values of the old ones elsewhere."""
    before, now = naive.embed(old), naive.embed(new)
    for layer in range(LAYERS):
        together = before.clone()
        together[fresh] = now[fresh]
        now = naive.layer(layer, together)
        before = naive.layer(layer, before)
    return naive.head(now)


@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
def test_exact_mode_is_plain_decoding_whatever_else_is_asked(transformer: Transformer, cache: str) -> None:
    ids = tokens(30, 8)
    exact = request(transformer, ids, 20, 3, exact=True, block_cache=cache, refresh=9, adaptive=True, audit=True)
    plain = request(transformer, ids, 0, 0, refresh=1)
    passes = run(transformer, exact)
    run(transformer, plain)
    assert torch.equal(exact.answer, plain.answer)
    assert joins(passes) == list(range(16))
    assert all(rows.prefix.layer == 0 for rows in passes if isinstance(rows.prefix, Join))


# ---- drift ----


def test_an_audit_lowers_a_depth_that_is_not_safe(transformer: Transformer) -> None:
    one = request(transformer, tokens(60, 2), 40, 4, audit=True, tau=0.9999)
    first = one.rows()
    assert first.last == 4
    run(transformer, one)
    assert one.passes.depth == 1 == one.passes.states.limit
    assert one.passes.lowered
    assert one.passes.counts.passes == 16


@pytest.mark.parametrize("depth", [2, 6])
def test_an_audit_that_finds_nothing_changes_nothing(transformer: Transformer, depth: int) -> None:
    with_audit, without = (
        request(transformer, tokens(60, 2), 40, depth, audit=audit, tau=-1.0) for audit in (True, False)
    )
    assert len(run(transformer, with_audit)) == len(run(transformer, without)) + 1
    assert torch.equal(with_audit.answer, without.answer)
    assert with_audit.passes.states.limit is None


def test_safe_depths() -> None:
    assert safe_depth([1.0, 0.99, 0.98], 0.97) == 3
    assert safe_depth([1.0, 0.99, 0.9], 0.97) == 1
    assert safe_depth([1.0, 0.99, 0.98, 0.9], 0.97) == 2
    assert safe_depth([1.0, 0.9, 0.99], 0.97) == 1


@pytest.mark.parametrize(("tau", "changes"), [(0.9999999, "shorter"), (-100.0, "longer")])
def test_the_interval_follows_the_drift(transformer: Transformer, tau: float, changes: str) -> None:
    settings = {"length": 32, "steps": 32, "refresh": 4, "tau": tau}
    fixed = request(transformer, tokens(60), 40, 1, **settings)
    adaptive = request(transformer, tokens(60), 40, 1, adaptive=True, **settings)
    assert joins(run(transformer, fixed)) == list(range(0, 32, 4))
    found = joins(run(transformer, adaptive))
    if changes == "shorter":
        assert found == [0, *range(4, 32)]
    else:
        assert found == [0, 4, 4 + 4 * STRETCH]


# ---- ends and log-probabilities ----


def test_a_request_ends_with_the_block_that_holds_an_end_token(transformer: Transformer) -> None:
    weights = transformer.weights
    ids = tokens(30)
    whole = request(transformer, ids, 20, 1, length=24)
    run(transformer, whole)
    end = int(whole.answer[9])
    first = [int(token) for token in whole.answer].index(end) // 8
    other = Transformer(replace(weights, config=replace(weights.config, end_tokens=(end,))))
    one = request(other, ids, 20, 1, length=24, ignore_end=False)
    run(other, one)
    assert one.done
    assert one.finished_blocks == first + 1
    assert torch.equal(one.answer[: 8 * (first + 1)], whole.answer[: 8 * (first + 1)])


def test_logprobs_are_those_of_the_commitment(transformer: Transformer) -> None:
    """Of an answer made in one pass, they are those of that pass."""
    ids = tokens(30, 3)
    one = request(transformer, ids, 20, 0, length=8, steps=1, logprobs=3)
    run(transformer, one)
    logits = Naive(MODEL).logits(torch.cat([ids, torch.full((8,), MASK)]))[30:]
    expected = logits.index_fill(-1, torch.tensor([MASK]), -torch.inf).log_softmax(-1)
    assert one.logprobs is not None
    best = expected.topk(3, dim=-1)
    torch.testing.assert_close(one.logprobs.chosen_N.double(), best.values[:, 0], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(one.logprobs.values_NK.double(), best.values, rtol=1e-3, atol=1e-3)
    assert one.logprobs.ranks_N.tolist() == [1] * 8
    assert one.logprobs.part(2, 4).tokens_NK.tolist() == best.indices[2:4].tolist()
