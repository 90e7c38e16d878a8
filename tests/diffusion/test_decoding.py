"""Requests from prompt to answer, and what reuse of the prefix does to answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.bench.dlm import tasks
from forebay.bench.dlm.tasks import END
from forebay.diffusion.decoding import DecodingSettings, DiffusionRequest, advance
from forebay.diffusion.errors import DiffusionError
from forebay.diffusion.prefix import PrefixStates
from forebay.diffusion.remasking import SCORES, choose, commit, quota, without
from forebay.diffusion.transformer import Transformer
from forebay.diffusion.weights import load
from tests.diffusion.naive import Naive

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "tests/assets/tinydlm-prefix"
MASK = 1


@pytest.fixture(scope="module")
def transformer() -> Transformer:
    return Transformer(load(MODEL))


def run(transformer: Transformer, requests: list[DiffusionRequest]) -> None:
    while waiting := [request for request in requests if not request.done]:
        advance(transformer, waiting)


def request(transformer: Transformer, ids: torch.Tensor, prefix: int, depth: int, **changes) -> DiffusionRequest:
    states = PrefixStates(ids[:prefix])
    states.deepen(transformer, depth)
    return DiffusionRequest(transformer, states, depth, ids[prefix:], DecodingSettings(**changes))


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(5, 4096, (count,), generator=torch.Generator().manual_seed(seed))


# ---- whole answers ----


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize(("length", "steps", "block"), [(8, 8, 8), (8, 4, 8), (10, 6, 4), (1, 1, 1), (12, 3, 4)])
def test_without_reuse_the_answer_is_that_of_plain_decoding(
    transformer: Transformer, length: int, steps: int, block: int, shifted: bool
) -> None:
    """LLaDA's low-confidence remasking as plainly as it can be written, with the logits where Dream has them too."""
    ids, naive = tokens(30, 5), Naive(MODEL)
    weights = transformer.weights
    transformer = Transformer(replace(weights, config=replace(weights.config, shifted=shifted)))
    mine = request(transformer, ids, 20, 0, length=length, steps=steps, block=block, refresh=1, ignore_end=True)
    run(transformer, [mine])
    everything = torch.cat([ids, torch.full((length,), MASK)])
    blocks = -(-length // block)
    for number in range(blocks):
        first, last = 30 + number * block, min(30 + (number + 1) * block, 30 + length)
        for step in range(max(1, steps // blocks)):
            logits = naive.logits(everything)
            logits = torch.cat([logits[:1], logits[:-1]]) if shifted else logits
            chances = logits.index_fill(-1, torch.tensor([MASK]), -torch.inf).softmax(-1)
            sure, best = chances.max(-1)
            masked = [place for place in range(first, last) if everything[place] == MASK]
            share = quota(last - first, max(1, steps // blocks), step)
            for place in sorted(masked, key=lambda place: -float(sure[place]))[: max(share, 1)]:
                everything[place] = best[place]
    assert torch.equal(mine.answer, everything[30:])
    assert mine.finished_blocks == blocks


def test_requests_that_come_and_go_do_not_change_each_other(transformer: Transformer) -> None:
    def make() -> list[DiffusionRequest]:
        return [
            request(transformer, tokens(20 + 7 * number, number), 5 + number, number % 4, length=6 + number, steps=9,
                    block=4, refresh=1 + number)
            for number in range(5)
        ]  # fmt: skip

    alone, together = make(), make()
    for one in alone:
        run(transformer, [one])
    run(transformer, together)
    for one, two in zip(alone, together, strict=True):
        assert torch.equal(one.answer, two.answer)


def test_a_threshold_takes_what_is_sure_and_at_least_one(transformer: Transformer) -> None:
    mine = request(transformer, tokens(30), 20, 1, length=16, steps=16, block=8, threshold=0.5, ignore_end=True)
    run(transformer, [mine])
    assert MASK not in mine.answer
    assert mine.passes.counts.passes <= 16


def test_a_seed_makes_the_same_answer_again(transformer: Transformer) -> None:
    def answer(seed: int) -> list[int]:
        mine = request(transformer, tokens(30), 20, 1, length=8, steps=8, block=8, temperature=1.0, seed=seed)
        run(transformer, [mine])
        return mine.answer.tolist()

    assert answer(1) == answer(1) != answer(2)


@pytest.fixture(scope="module")
def accuracy(transformer: Transformer) -> dict[int, float]:
    """By b, share of 40 right answers."""
    found = {}
    for depth in (0, 1, 2, 6):
        requests = []
        items = tasks.items(MODEL, "legend", 40, 10_004)
        for item in items:
            prefix = torch.tensor(item.prefix)
            states = PrefixStates(prefix)
            states.deepen(transformer, depth)
            chosen = DecodingSettings(length=8, steps=8, block=8, refresh=8)
            requests.append(DiffusionRequest(transformer, states, depth, torch.tensor(item.rest), chosen))
        run(transformer, requests)
        right = [
            one.answer.tolist()[: len(item.answer) + 1] == [*item.answer, END]
            for one, item in zip(requests, items, strict=True)
        ]
        found[depth] = sum(right) / len(right)
    return found


def test_shallow_reuse_keeps_the_answers(accuracy: dict[int, float]) -> None:
    assert accuracy[0] > 0.9
    assert accuracy[1] > accuracy[0] - 0.05


def test_deeper_reuse_loses_them(accuracy: dict[int, float]) -> None:
    """Else the model tests nothing: b = L is ordinary prefix reuse."""
    assert accuracy[2] < 0.3
    assert accuracy[6] < 0.1


def test_a_shifted_model_needs_a_prompt_token_outside_of_the_prefix(transformer: Transformer) -> None:
    weights = transformer.weights
    other = Transformer(replace(weights, config=replace(weights.config, shifted=True)))
    with pytest.raises(DiffusionError, match="the prefix takes the whole prompt"):
        request(other, tokens(20), 20, 1, length=4)


# ---- choosing ----


@pytest.mark.parametrize("remasking", SCORES)
def test_the_mask_is_never_chosen(remasking: str) -> None:
    logits = torch.zeros(50, 9)
    logits[:, 4] = 100.0
    random = torch.Generator().manual_seed(0)
    found = choose(without(logits, 4), remasking=remasking, temperature=1.0, random=random)
    assert 4 not in found.tokens_N


def test_scores() -> None:
    chances = torch.tensor([[0.6, 0.3, 0.1], [0.5, 0.5, 0.0]])
    logits = torch.cat([chances.log(), torch.full((2, 1), 9.0)], 1)
    expected = {
        "confidence": [0.6, 0.5],
        "entropy": [-0.8979, -0.6931],
        "margin": [0.3, 0.0],
    }
    for name, values in expected.items():
        assert choose(without(logits, 3), remasking=name).scores_N.tolist() == pytest.approx(values, abs=1e-3)


@given(st.integers(1, 60), st.floats(0.05, 1.0), st.integers(0, 99))
@settings(deadline=None)
def test_top_p_takes_the_smallest_set_that_reaches_it(count: int, top_p: float, seed: int) -> None:
    logits = torch.randn(1, count + 1, generator=torch.Generator().manual_seed(seed)) * 3
    chances = logits[0, :count].softmax(-1).sort(descending=True)
    enough = int((chances.values.cumsum(0) < top_p).sum()) + 1
    allowed = set(chances.indices[:enough].tolist())
    random = torch.Generator().manual_seed(seed)
    many = logits.repeat(200, 1)
    found = choose(without(many, count), temperature=1.0, top_p=top_p, random=random)
    assert set(found.tokens_N.tolist()) <= allowed


@given(st.integers(1, 64), st.integers(1, 64))
def test_quotas_fill_a_block(masked: int, steps: int) -> None:
    shares = [quota(masked, steps, step) for step in range(steps)]
    assert sum(shares) == masked
    assert max(shares) - min(shares) <= 1
    assert shares == sorted(shares, reverse=True)


def test_commit() -> None:
    scores = torch.tensor([0.1, 0.9, 0.5, 0.95])
    assert [part.tolist() for part in commit(scores, 2)] == [[3, 1], [0, 2]]
    assert [part.tolist() for part in commit(scores, 1, 0.4)] == [[3, 1, 2], [0]]
    assert [part.tolist() for part in commit(scores, 3, 0.99)] == [[3], [0, 1, 2]]
    assert [part.tolist() for part in commit(scores, 9)] == [[3, 1, 2, 0], []]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps is 0; it must be at least 1"),
        ({"remasking": "best"}, "remasking is 'best'; it must be one of confidence, entropy, margin, random"),
        ({"top_p": 0.0}, "top_p is 0; it must be above 0"),
        ({"threshold": 1.0}, "threshold is 1; it must be between 0 and 1"),
        ({"temperature": -1.0}, "temperature is -1"),
    ],
)
def test_settings_that_make_no_sense(changes: dict[str, object], message: str) -> None:
    with pytest.raises(DiffusionError, match=message):
        DecodingSettings(**changes)
