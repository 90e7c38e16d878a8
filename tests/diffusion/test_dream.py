"""A small model in Dream's style, trained: the logits of a token are those of the row before it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from forebay.diffusion.decoding import DecodingSettings, DiffusionRequest, advance
from forebay.diffusion.errors import DiffusionError
from forebay.diffusion.prefix import PrefixStates
from forebay.diffusion.prefixes import PrefixFinder
from forebay.diffusion.remasking import quota
from forebay.diffusion.runtime import Runtime
from forebay.diffusion.transformer import Rows, Transformer
from forebay.diffusion.weights import load, read_config
from tests.diffusion.fills import Gaps, fill, gaps
from tests.diffusion.naive import Naive

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "tests/assets/tinydlm-dream-6m"
MASK, BEGIN, LAYERS = 1, 0, 6
TEXT = "The function returns a list of the names of all modules that have been imported so far, in the order in which"


@pytest.fixture(scope="module")
def transformer() -> Transformer:
    return Transformer(load(MODEL))


@pytest.fixture(scope="module")
def naive() -> Naive:
    return Naive(MODEL)


@pytest.fixture(scope="module")
def prompt() -> torch.Tensor:
    return torch.tensor([BEGIN, *Tokenizer.from_file(str(MODEL / "tokenizer.json")).encode(TEXT).ids])


@pytest.fixture(scope="module")
def items() -> list[Gaps]:
    """128 tokens each, as many as the model was trained on; 15 % of the second half are gaps."""
    return list(gaps(MODEL, ROOT / "docs", prefix=64, rest=64, share=0.15, begin=[BEGIN]))[::3]


def request(transformer: Transformer, ids: torch.Tensor, prefix: int, depth: int, **changes) -> DiffusionRequest:
    states = PrefixStates(ids[:prefix])
    states.deepen(transformer, depth)
    return DiffusionRequest(transformer, states, depth, ids[prefix:], DecodingSettings(ignore_end=True, **changes))


def answer(transformer: Transformer, *given, **changes) -> list[int]:
    mine = request(transformer, *given, **changes)
    while not mine.done:
        advance(transformer, [mine])
    return mine.answer.tolist()


def plain_answer(naive: Naive, prompt: torch.Tensor, length: int, steps: int, block: int) -> list[int]:
    """Dream's `maskgit_plus` within blocks, as plainly as it can be written."""
    tokens = torch.cat([prompt, torch.full((length,), MASK)])
    blocks = -(-length // block)
    for number in range(blocks):
        first = len(prompt) + number * block
        last = min(first + block, len(tokens))
        for step in range(steps // blocks):
            logits = naive.logits(tokens)[first - 1 : last - 1]
            logits[:, MASK] = -torch.inf
            sure, best = logits.softmax(-1).max(-1)
            sure[tokens[first:last] != MASK] = -1
            for place in sure.topk(quota(last - first, steps // blocks, step)).indices.tolist():
                tokens[first + place] = best[place]
    return tokens[len(prompt) :].tolist()


def test_what_the_folder_says() -> None:
    family, config = read_config(MODEL)
    assert (family.name, config.shifted, config.mask_token, config.end_tokens) == ("Llama", True, MASK, (BEGIN,))


@pytest.mark.parametrize("count", [1, 2, 33, 150])
def test_equals_the_plain_forward_pass(transformer: Transformer, naive: Naive, count: int) -> None:
    ids = torch.randint(5, 4096, (count,), generator=torch.Generator().manual_seed(count))
    (found,) = transformer.run([Rows(tokens_N=ids, positions_N=torch.arange(count))])
    assert float((transformer.logits(found.hidden_ND) - naive.logits(ids)).abs().max()) < 1e-4


@pytest.mark.parametrize("prefix", [0, 1, 12, -1])
@pytest.mark.parametrize(("length", "steps", "block"), [(16, 16, 8), (16, 8, 16), (10, 6, 4), (1, 1, 1)])
def test_without_reuse_the_answer_is_that_of_plain_decoding(
    transformer: Transformer, naive: Naive, prompt: torch.Tensor, prefix: int, length: int, steps: int, block: int
) -> None:
    """Wherever the prefix ends: -1 leaves the last prompt token alone, whose row gives the first logits."""
    size = prefix % len(prompt)
    mine = answer(transformer, prompt, size, 0, length=length, steps=steps, block=block, refresh=1)
    assert mine == plain_answer(naive, prompt, length, steps, block)


def test_an_exact_request_is_plain_decoding_whatever_it_could_reuse(
    transformer: Transformer, naive: Naive, prompt: torch.Tensor
) -> None:
    changes = {"length": 16, "steps": 8, "block": 8, "refresh": 4, "block_cache": "dual", "exact": True}
    assert answer(transformer, prompt, 15, 3, **changes) == plain_answer(naive, prompt, 16, 8, 8)


@pytest.mark.parametrize("block_cache", ["none", "prefix", "dual"])
@pytest.mark.parametrize("depth", [0, 1, LAYERS])
def test_a_block_in_one_step_reads_only_its_first_pass(
    transformer: Transformer, naive: Naive, prompt: torch.Tensor, block_cache: str, depth: int
) -> None:
    """Then no cache within a request changes anything, and with b = 0 the answer is the plain one."""
    changes = {"length": 12, "steps": 3, "block": 4, "refresh": 1}
    mine = answer(transformer, prompt, len(prompt) - 1, depth, block_cache=block_cache, **changes)
    assert mine == answer(transformer, prompt, len(prompt) - 1, depth, **changes)
    assert depth or mine == plain_answer(naive, prompt, 12, 3, 4)


# ---- where the prefix ends ----


def test_the_prefix_leaves_the_last_prompt_token(transformer: Transformer, prompt: torch.Tensor) -> None:
    with pytest.raises(DiffusionError, match="this model needs its last token outside of it"):
        request(transformer, prompt, len(prompt), 1, length=4)
    settings = DecodingSettings(length=8, steps=8, block=8, ignore_end=True)
    runtime, found = Runtime(transformer, None), []
    for prefix in (len(prompt), len(prompt) - 1):
        runtime.submit(str(prefix), prompt, settings, prefix)
    while not runtime.idle:
        found += [block.tokens_N.tolist() for block in runtime.step()]
    assert found[0] == found[1]


def test_a_prompt_of_one_token_has_no_prefix(transformer: Transformer, naive: Naive) -> None:
    ids = torch.tensor([BEGIN])
    assert answer(transformer, ids, 0, 0, length=4, steps=4, block=4, refresh=1) == plain_answer(naive, ids, 4, 4, 4)


def test_prefixes_that_are_found_may_be_used(transformer: Transformer, prompt: torch.Tensor) -> None:
    finder = PrefixFinder(shifted=True, least=8)
    sizes = [finder.find(prompt) for _ in range(3)]
    assert sizes == [0, len(prompt) - 1, len(prompt) - 1]
    assert len(answer(transformer, prompt, sizes[-1], 1, length=4, steps=4, block=4)) == 4


# ---- text ----


def test_gaps_in_text_are_filled_as_well_with_reuse(transformer: Transformer, items: list[Gaps]) -> None:
    """Better than the most frequent token by far (.156 against .05). This model's prefixes drift little, so depth costs
    next to nothing: that reuse may also ruin answers is what `test_decoding` shows with another one."""
    truth = torch.cat([item.text_N[item.gaps] for item in items])
    without, bicache, ordinary = (fill(transformer, items, depth).argmax(-1) for depth in (0, 1, LAYERS))

    def accuracy(found: torch.Tensor) -> float:
        return float((found == truth).float().mean())

    assert accuracy(without) > 2 * float(truth.bincount().max()) / len(truth) > 0
    assert accuracy(bicache) > accuracy(without) - 0.02
    assert accuracy(ordinary) > accuracy(without) - 0.04
    assert float((bicache == without).float().mean()) > 0.94


def test_the_logits_are_one_row_before(transformer: Transformer, items: list[Gaps]) -> None:
    """Read where LLaDA has them, they are surprised by the text: in nats a token."""
    weights = transformer.weights
    other = Transformer(replace(weights, config=replace(weights.config, shifted=False)))
    truth = torch.cat([item.text_N[item.gaps] for item in items])
    right, wrong = (-float(fill(one, items, 0)[range(len(truth)), truth].mean()) for one in (transformer, other))
    assert right < wrong - 0.3


def test_answers_hardly_change_with_reuse(transformer: Transformer, items: list[Gaps]) -> None:
    same = []
    for item in items[:10]:
        ids = torch.cat([item.prefix_P, item.text_N[:16]])
        changes = {"length": 16, "steps": 16, "block": 8, "refresh": 8}
        one, two = (answer(transformer, ids, 64, depth, **changes) for depth in (0, 1))
        same += [mine == other for mine, other in zip(one, two)]
    assert sum(same) / len(same) > 0.8
