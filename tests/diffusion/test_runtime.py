"""Requests that come, share, finish and are aborted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forebay.diffusion.decoding import DecodingSettings
from forebay.diffusion.depth import DepthTable
from forebay.diffusion.errors import DiffusionError
from forebay.diffusion.runtime import Block, Runtime, RuntimeSettings
from forebay.diffusion.transformer import Transformer
from forebay.diffusion.weights import load

MODEL = Path(__file__).parents[2] / "tests/assets/tinydlm-prefix"
TABLE = DepthTable({0: 1, 40: 2, 70: 3}, 6, "test")


@pytest.fixture(scope="module")
def transformer() -> Transformer:
    return Transformer(load(MODEL))


def runtime(transformer: Transformer, **changes) -> Runtime:
    return Runtime(transformer, TABLE, RuntimeSettings(**{"cache_bytes": 1 << 20, "audit": 0, **changes}))


def tokens(count: int, seed: int) -> torch.Tensor:
    return torch.randint(5, 4096, (count,), generator=torch.Generator().manual_seed(seed))


def settings(number: int) -> DecodingSettings:
    return DecodingSettings(length=5 + 3 * number, steps=6, block=4, refresh=1 + number % 4)


def drive(mine: Runtime) -> list[Block]:
    found = []
    while not mine.idle:
        found += mine.step()
    return found


def answers(blocks: list[Block]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for block in blocks:
        found.setdefault(block.name, []).extend(block.tokens_N.tolist())
    return found


def submit(mine: Runtime, number: int) -> None:
    shared = tokens(30, number % 2)
    mine.submit(str(number), torch.cat([shared, tokens(4 + number, 50 + number)]), settings(number), prefix=30)


@pytest.mark.parametrize("batch", [1, 3, 32])
def test_answers_do_not_depend_on_the_company(transformer: Transformer, batch: int) -> None:
    alone = {}
    for number in range(6):
        mine = runtime(transformer)
        submit(mine, number)
        alone |= answers(drive(mine))
    mine, found = runtime(transformer, batch=batch), []
    for number in range(6):
        submit(mine, number)
        found += mine.step()
    assert answers(found + drive(mine)) == alone
    again = runtime(transformer, batch=batch)
    for number in range(6):
        submit(again, number)
    assert answers(drive(again)) == alone
    assert (again.cache.statistics.hits, again.cache.statistics.misses) == (4, 2)


def test_blocks_come_in_order_and_the_last_one_says_so(transformer: Transformer) -> None:
    mine = runtime(transformer)
    submit(mine, 3)
    blocks = drive(mine)
    assert [len(block.tokens_N) for block in blocks] == [4, 4, 4, 2]
    assert [block.last for block in blocks] == [False, False, False, True]


def test_an_abort_lets_the_states_go(transformer: Transformer) -> None:
    mine = runtime(transformer, batch=2)
    for number in range(4):
        submit(mine, number)
    mine.step()
    for name in ("0", "3", "unknown"):
        mine.abort(name)
    assert answers(drive(mine)).keys() == {"1", "2"}
    mine.cache.capacity = 0
    mine.cache.release(mine.cache.acquire(tokens(3, 0), 1))
    assert mine.cache.bytes == 0


def test_no_table_is_no_reuse(transformer: Transformer) -> None:
    mine = Runtime(transformer, None)
    submit(mine, 1)
    assert len(answers(drive(mine))["1"]) == 8
    assert not mine.cache.statistics.misses


@pytest.mark.parametrize(
    ("prompt", "length", "prefix", "message"),
    [
        (1000, 25, 0, "1000 prompt tokens and 25 to generate are 1025; the model has 1024 positions"),
        (10, 4, 11, "a prefix of 11 tokens in a prompt of 10"),
    ],
)
def test_requests_that_cannot_be(transformer: Transformer, prompt: int, length: int, prefix: int, message: str) -> None:
    with pytest.raises(DiffusionError, match=message):
        runtime(transformer).submit("a", tokens(prompt, 0), DecodingSettings(length=length), prefix)
