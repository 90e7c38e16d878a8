"""Requests that come, share, finish and are aborted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forebay.bench.dlm.shape import llada_shape, random_weights
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


@pytest.mark.parametrize("steps", range(0, 12))
def test_an_abort_in_any_phase(transformer: Transformer, steps: int) -> None:
    """While it waits, in its audit, at a refresh, within a block: nothing of it stays, and the others do not notice."""
    alone = runtime(transformer, audit=1)
    submit(alone, 2)
    expected = answers(drive(alone))
    mine, found = runtime(transformer, audit=1), []
    for number in (4, 2):
        submit(mine, number)
    for _ in range(steps):
        found += mine.step()
    mine.abort("4")
    found += drive(mine)
    assert answers(found)["2"] == expected["2"]
    mine.cache.clear()
    assert (len(mine.cache), mine.cache.bytes) == (0, 0)


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


def test_prefixes_are_found_without_being_named(transformer: Transformer) -> None:
    mine = runtime(transformer)
    shared = tokens(90, 0)
    for number in range(4):
        mine.submit(str(number), torch.cat([shared, tokens(10, 60 + number)]), settings(0))
        drive(mine)
    assert mine.statistics.depths == {0: 1, 2: 3}
    assert (mine.cache.statistics.hits, mine.cache.statistics.misses) == (2, 1)


def test_a_pass_has_a_limited_number_of_rows(transformer: Transformer) -> None:
    """Refreshes come one after another, and the answers are the same as without a limit."""
    found = {}
    for rows in (10_000, 60):
        mine = runtime(transformer, rows=rows)
        for number in range(6):
            submit(mine, number)
        weights, blocks = [], []
        while not mine.idle:
            mine._admit()
            before = {one.name: one.request.weight for one in mine.running if one.request}
            passes = {one.name: one.request.passes.counts.passes for one in mine.running if one.request}
            held = list(mine.running)
            blocks += mine.step()
            went = [one for one in held if one.request and one.request.passes.counts.passes > passes[one.name]]
            weights.append(sum(before[one.name] for one in went))
            assert went
        found[rows] = answers(blocks)
        assert max(weights) <= rows
    assert found[60] == found[10_000]


def test_memory_decides_who_runs(transformer: Transformer) -> None:
    mine = runtime(transformer, request_bytes=2 * 50 * 192 * 2 * 6 * 4)
    for number in range(4):
        submit(mine, number)
        assert mine.waiting[-1].bytes == (30 + 4 + number + 5 + 3 * number) * 192 * 2 * 6 * 4
    mine.step()
    assert len(mine.running) == 2
    assert answers(drive(mine)).keys() <= {"0", "1", "2", "3"}
    with pytest.raises(DiffusionError, match=r"120 tokens need \d+ bytes of keys and values; there are \d+ for all"):
        mine.submit("long", tokens(100, 0), DecodingSettings(length=20))


def test_an_audit_lowers_the_depth_for_those_who_follow(transformer: Transformer) -> None:
    mine = runtime(transformer, audit=2, tau=0.99999)
    for number in range(4):
        submit(mine, 2 * number)
        drive(mine)
    assert mine.statistics.interventions == 1
    assert mine.statistics.audits == 2
    assert mine.statistics.depths == {1: 4}


def test_ten_thousand_requests_take_no_more_memory() -> None:
    """Of anything that the runtime remembers."""
    small = Transformer(random_weights(llada_shape(layers=2, hidden=8, intermediate=8, heads=1, vocabulary=5000)))
    mine = Runtime(small, DepthTable({0: 1}, 2, "test"), RuntimeSettings(cache_bytes=1 << 16, batch=100, audit=0))
    one = DecodingSettings(length=1, steps=1, block=1)
    sizes = []
    for number in range(10_000):
        mine.submit(str(number), torch.tensor([5 + number // 5, 7, 8]), one, prefix=2)
        if number % 100 == 99:
            drive(mine)
            sizes.append((len(mine.cache), mine.cache.bytes, len(mine.finder.known)))
    assert mine.statistics.tokens == 10_000
    assert max(sizes[50:]) == max(sizes[10:50])
    assert all(held <= 1 << 16 for _, held, _ in sizes)
