"""The parts of `forebay bench dlm` that are quick: cost model, model folders, tasks, arms on one's own model."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count
from typer.testing import CliRunner

from forebay.bench.dlm import exact, memory
from forebay.bench.dlm.arms import ARMS, BICACHE, BICACHE_DUAL, NONE, Arm
from forebay.bench.dlm.quality import MODEL, interval
from forebay.bench.dlm.shape import llada_shape, random_weights, save
from forebay.bench.dlm.speed import Bench
from forebay.bench.dlm.suite import BARS, DLM, PARTS
from forebay.bench.dlm.tasks import TASKS, items, right
from forebay.bench.suite import Context, select
from forebay.cli.app import app
from forebay.diffusion import transformer
from forebay.diffusion.attention import combine, fused
from forebay.diffusion.decoding import advance
from forebay.diffusion.transformer import Transformer
from forebay.diffusion.weights import load
from forebay.storage.errors import ConfigError

pytestmark = pytest.mark.usefixtures("one_thread")


def count_attention(query, key, value, *arguments, out_shape=None, **options) -> int:
    return sdpa_flop_count(query, key, value)


ATTENTION = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: count_attention}
"""PyTorch does not count it."""


def context(work: Path) -> Context:
    return Context(work, True, 1, frozenset(), lambda text: None)


@pytest.fixture(scope="module")
def bench() -> Bench:
    config = llada_shape(hidden=32, intermediate=48, heads=2, vocabulary=64)
    return Bench.make(Transformer(random_weights(config)), 200)


@pytest.mark.parametrize(
    ("arm", "passes", "expected"),
    [(NONE, 1, "full"), (BICACHE, 1, "refresh"), (BICACHE, 2, "step"), (BICACHE_DUAL, 2, "block_step")],
)
def test_the_cost_model_counts_what_is_computed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, arm: Arm, passes: int, expected: str
) -> None:
    """Against PyTorch's own count of a pass, which leaves out a little of the first and the last layers."""
    monkeypatch.setattr(transformer, "linear", torch.nn.functional.linear)  # it does not see our kernels
    monkeypatch.setattr(bench.transformer, "attention", partial(combine, attention=fused))
    request = bench.request(arm)
    for _ in range(passes):
        with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counted:
            advance(bench.transformer, [request])
    cost = getattr(bench.cost, expected)
    modelled = cost(bench.depth) if expected == "refresh" else cost()
    assert counted.get_total_flops() == pytest.approx(modelled, rel=0.05)


def test_a_saved_model_is_the_same_model(tmp_path: Path) -> None:
    weights = random_weights(llada_shape(layers=2, hidden=32, intermediate=48, heads=2, vocabulary=64))
    save(weights, tmp_path / "model", MODEL)
    again = load(tmp_path / "model")
    assert again.config.mask_token == weights.config.mask_token
    tokens = torch.arange(5, 40)
    assert torch.equal(exact.plain_logits(again, tokens), exact.plain_logits(weights, tokens))


@pytest.mark.parametrize("task", TASKS)
def test_items_are_what_their_text_says(task: str) -> None:
    for item in items(MODEL, task, 20, 3):
        rows = [item.prefix[place : place + 3] for place in range(0, len(item.prefix), 3)]
        assert len({row[0] for row in rows}) == len(rows)
        found = next(row[1] for row in rows if row[0] == item.rest[-1])
        if task == "legend":
            found = item.rest[item.rest.index(found) + 1]
        assert right([found, 0, 0, 9], item)
        assert not right([found, found, 0], item)


def test_nothing_that_is_reused_exactly_changes_logits(tmp_path: Path) -> None:
    assert exact.measure(context(tmp_path)).ratios["exact_mode_maxdiff"] < 1e-4


def test_states_are_smaller_than_the_published_ones(tmp_path: Path) -> None:
    found = memory.measure(context(tmp_path))
    assert found.ratios["state_bytes_vs_published"] < 0.4
    assert found.details["p1450"]["depth"] == 15


def test_wilson() -> None:
    low, high = interval(286, 300)
    assert (round(low, 3), round(high, 3)) == (0.923, 0.972)


def test_every_ratio_has_a_part_and_a_bar() -> None:
    measured = [name for part in PARTS for name in part.ratios]
    assert sorted(measured) == sorted(bar.name for bar in BARS)
    assert "vs_none_p4000" not in select(DLM, (), quick=True)
    with pytest.raises(ConfigError, match="vs_none_p4000 is measured in the long form only; leave out --quick"):
        select(DLM, ["vs_none_p4000"], quick=True)


# ---- one's own model ----


def run(*arguments: str):
    return CliRunner().invoke(app, ["bench", "dlm", *arguments])


def test_arms_on_ones_own_model(tmp_path: Path) -> None:
    lines = [
        {"system": "one two; three four; five six;", "prompt": "? three", "answer": "four"},
        {"prompt": "? one"},
    ]
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, lines)))
    files = ["--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png")]
    result = run("--model", str(MODEL), "--tasks", str(tmp_path / "tasks.jsonl"), "--length", "8", *files)
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["arms"].keys() == {arm.name for arm in ARMS}
    assert report["arms"]["none"]["agreement"] == report["arms"]["none"]["speedup"] == 1.0
    assert all(0 <= arm["accuracy"] <= 1 and arm["tokens_per_second"] > 0 for arm in report["arms"].values())
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (None, [], "--model and --tasks belong together"),
        ("", [], "is empty; give lines such as"),
        ('{"question": 1}', [], "tasks.jsonl:1 has no prompt; give lines such as"),
        ('{"prompt": "a"}', ["--length", "2000"], "the model has 1024 positions"),
        ('{"prompt": "a"}', ["--dtype", "int4"], "--dtype is 'int4'; it must be one of float32, bfloat16, float16"),
    ],
)
def test_mistakes(tmp_path: Path, content: str | None, options: list[str], message: str) -> None:
    path = tmp_path / "tasks.jsonl"
    if content is not None:
        path.write_text(content)
        options = [*options, "--tasks", str(path)]
    result = run("--model", str(MODEL), *options)
    assert result.exit_code != 0
    assert message in " ".join(str(result.exception or "").split()) + " ".join(result.output.split())
