"""Tables of depths, and the similarities that they are made of."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forebay.bench.dlm import tasks
from forebay.diffusion.depth import TABLES, make_table, similarity
from forebay.diffusion.transformer import Rows, Transformer
from forebay.diffusion.weights import load
from tests.diffusion.naive import Naive

MODEL = Path(__file__).parents[2] / "tests/assets/tinydlm-prefix"


@pytest.mark.parametrize(
    ("prefix", "user", "paper"), [(500, 100, 13), (750, 100, 15), (1450, 100, 16), (4000, 100, 17), (8000, 200, 19)]
)
def test_published_depths(prefix: int, user: int, paper: int) -> None:
    """Those of the research notes' cost model, which takes a generation of 256."""
    table = TABLES["LLaDA-8B-Instruct"]
    assert table.depth(prefix, prefix + user, 256, "paper") == paper
    assert table.depth(prefix, prefix + user, 256) == paper - 1


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("rule", ["paper", "boundary"])
def test_tables_rise(name: str, rule: str) -> None:
    table = TABLES[name]
    depths = [table.depth(one, 100, 0, rule) for one in range(101)]
    assert depths == sorted(depths)
    assert depths[0] == 1
    assert depths[100] == table.layers


shares = st.lists(
    st.tuples(st.integers(0, 100), st.lists(st.floats(0.5, 1.0), min_size=5, max_size=5)), min_size=1, max_size=12
)


@given(shares, st.floats(0.6, 0.99))
def test_a_depth_is_the_most_that_any_smaller_share_allows(found: list[tuple[int, list[float]]], tau: float) -> None:
    table = make_table(found, "test", tau)

    def leading(values: list[float]) -> int:
        return next((layer for layer in range(5) if values[layer] <= tau), 5)

    for percent in range(101):
        allowed = [leading(values) for share, values in found if share <= percent]
        assert table.depth(percent, 100, 0, "paper") == max([1, *allowed])


def rows(ids: torch.Tensor) -> Rows:
    return Rows(tokens_N=ids, positions_N=torch.arange(len(ids)), keep=True)


def test_similarity_is_that_without_rope() -> None:
    """Against keys and values of plain passes, which have no rotation yet."""
    transformer, naive = Transformer(load(MODEL)), Naive(MODEL)
    (item,) = tasks.items(MODEL, "legend", 1, 3)
    ids = torch.tensor([*item.prefix, *item.rest])
    prefix = len(item.prefix)
    passes = {count: transformer.run([rows(ids[:count])])[0].own for count in (prefix, len(ids))}
    found = similarity(passes[prefix], passes[len(ids)])
    plain = {}
    for count in (prefix, len(ids)):
        seen: list[torch.Tensor] = []
        project = naive.project

        def watch(layer: int, name: str, x: torch.Tensor, project=project, seen=seen) -> torch.Tensor:
            made = project(layer, name, x)
            if name in ("self_attn.k_proj", "self_attn.v_proj"):
                seen.append(made)
            return made

        naive.project = watch
        naive.logits(ids[:count])
        naive.project = project
        plain[count] = seen
    for layer in range(6):
        pairs = zip(plain[prefix][2 * layer : 2 * layer + 2], plain[len(ids)][2 * layer : 2 * layer + 2], strict=True)
        expected = sum(float(torch.cosine_similarity(one, two[:prefix], dim=-1).mean()) for one, two in pairs) / 2
        assert found[layer] == pytest.approx(expected, abs=1e-5)
    assert found[0] == pytest.approx(1.0, abs=1e-6)


def test_the_rules_on_a_model_that_depends_on_its_prefix() -> None:
    """The paper's rule reads one layer too deep here (`test_decoding`: b = 2 loses the answers), ours does not."""
    transformer = Transformer(load(MODEL))
    means = torch.zeros(6)
    items = tasks.items(MODEL, "legend", 12, 11)
    for item in items:
        ids = torch.tensor([*item.prefix, *item.rest])
        alone, whole = (transformer.run([rows(part)])[0].own for part in (ids[: len(item.prefix)], ids))
        means += torch.tensor(similarity(alone, whole)) / len(items)
    table = make_table([(80, means.tolist())], "legends")
    assert table.depth(132, 153, 8, "paper") == 2
    assert table.depth(132, 153, 8) == 1
