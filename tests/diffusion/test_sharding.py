"""Tensor parallelism: two halves of a model give what the whole does."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from forebay.diffusion.decoding import DecodingSettings
from forebay.diffusion.depth import DepthTable
from forebay.diffusion.errors import ModelError
from forebay.diffusion.runtime import Runtime, RuntimeSettings
from forebay.diffusion.transformer import Rows, Transformer
from forebay.diffusion.weights import Shard, load

MODEL = Path(__file__).parents[2] / "tests/assets/tinydlm-prefix"


class Group:
    """Sums tensors over threads that take the place of processes."""

    def __init__(self, size: int) -> None:
        self.barrier, self.parts = threading.Barrier(size, timeout=60), [torch.empty(0)] * size

    def reducer(self, rank: int):
        def reduce(tensor: torch.Tensor) -> torch.Tensor:
            self.parts[rank] = tensor
            self.barrier.wait()
            total = sum(self.parts[1:], self.parts[0])
            self.barrier.wait()
            return total

        return reduce


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(5, 4096, (count,), generator=torch.Generator().manual_seed(seed))


def together(size: int, work) -> list:
    group = Group(size)

    def one(rank: int):
        return work(Transformer(load(MODEL, shard=Shard(rank, size)), group.reducer(rank)))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


@pytest.mark.parametrize("size", [2, 4])
def test_parts_give_what_the_whole_gives(size: int) -> None:
    rows = Rows(tokens_N=tokens(40), positions_N=torch.arange(40), keep=True)
    (whole,) = Transformer(load(MODEL)).run([rows])
    parts = [found for (found,) in together(size, lambda transformer: transformer.run([rows]))]
    for part in parts:
        torch.testing.assert_close(part.hidden_ND, whole.hidden_ND, rtol=1e-4, atol=1e-3)
        assert torch.equal(part.hidden_ND, parts[0].hidden_ND)
    keys = torch.cat([part.own[3].keys for part in parts], 1)
    torch.testing.assert_close(keys, whole.own[3].keys, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tau", [-1.0, 0.99999])
def test_all_parts_decide_the_same(tau: float) -> None:
    """Audits and adaptive intervals too, though each part sees its own heads only."""
    table = DepthTable({0: 3}, 6, "test")

    def work(transformer: Transformer) -> tuple[list[int], object]:
        runtime = Runtime(transformer, table, RuntimeSettings(tau=tau, audit=1, rule="paper"))
        settings = DecodingSettings(length=24, steps=24, block=8, refresh=4, adaptive=True, temperature=0.7, seed=3)
        for number in range(3):
            runtime.submit(str(number), torch.cat([tokens(30), tokens(6, number)]), settings, 30)
        found = []
        while not runtime.idle:
            found += [token for block in runtime.step() for token in block.tokens_N.tolist()]
        return found, (runtime.statistics.interventions, runtime.statistics.refreshes)

    first, second = together(2, work)
    assert first == second
    assert (first[1][0] > 0) == (tau > 0)


@pytest.mark.parametrize(("size", "message"), [(3, "tensor parallel size 3 does not divide the model's 4 heads")])
def test_sizes_that_do_not_divide(size: int, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load(MODEL, shard=Shard(0, size))
