"""What goes beyond the paper: one budget for all layers, the refit of down, and the cache of backbones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from forebay.compression.backbone import Backbone
from forebay.compression.budget import Sizes, estimate, units_within
from forebay.compression.cache import BackboneCache
from forebay.compression.errors import CompressionError
from forebay.compression.experts import Expert
from forebay.compression.importance import ACTIVATIONS, hidden
from forebay.compression.layer import Options, compress_layer
from forebay.compression.refit import RIDGE, refit_down
from forebay.compression.restore import CompressedFolder
from forebay.compression.run import compress
from forebay.compression.source import ModelFolder
from tests.compression.conftest import MODEL, settings

SIZES = Sizes.of(ModelFolder(MODEL), [0, 1, 2, 3], Options())
BUDGET = SIZES.total(1700)
"""About rho 0.8."""


def weight_bytes(folder: Path) -> int:
    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            total += sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118
    return total


# ---- a budget ----


def random_expert(seed: int, units: int = 24, size: int = 16) -> Expert:
    random = torch.Generator().manual_seed(seed)
    shapes = (units, size), (units, size), (size, units)
    return Expert(*(torch.randn(shape, generator=random) for shape in shapes))


@given(st.integers(0, SIZES.layers * SIZES.experts * SIZES.units + 500))
def test_the_budget_is_used_to_the_last_unit(kept):
    units = units_within(SIZES, SIZES.total(max(kept, SIZES.layers * SIZES.floor)) + kept % (SIZES.unit + 4))
    most = SIZES.layers * SIZES.experts * SIZES.units
    assert units == min(max(kept, SIZES.layers * SIZES.floor), most)


def test_a_model_in_a_budget(tmp_path):
    config = compress(MODEL, tmp_path / "out", settings(memory_budget=BUDGET))
    CompressedFolder(tmp_path / "out").verify()
    assert weight_bytes(tmp_path / "out") == BUDGET
    by_layer = [sum(config.kept[layer]) for layer in config.layers]
    assert sum(by_layer) == 1700
    assert len(set(by_layer)) > 1, "all layers the same: they did not compete"
    assert min(min(kept) for kept in config.kept.values()) >= 4
    assert config.rho == pytest.approx(1 - 1700 / (4 * 16 * 128))
    assert config.made_with["memory_budget"] == BUDGET
    assert estimate(MODEL, settings(memory_budget=BUDGET))["bytes"] == BUDGET


def test_a_budget_that_was_interrupted(tmp_path):
    """In the middle of the calibration, then between two layers that are written."""
    whole, out = tmp_path / "whole", tmp_path / "out"
    compress(MODEL, whole, settings(memory_budget=BUDGET, options=Options(refit=True)))
    for stop in ("layer 2: scoring", "copying the rest"):

        def report(text, done, total, stop=stop):
            if text == stop:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            compress(MODEL, out, settings(memory_budget=BUDGET, options=Options(refit=True)), report)
    (out.with_name("out.partial") / "parser-layer-00002.safetensors").unlink()
    compress(MODEL, out, settings(memory_budget=BUDGET, options=Options(refit=True)))
    for path in whole.iterdir():
        assert path.read_bytes() == (out / path.name).read_bytes(), path.name
    assert {path.name for path in out.iterdir()} == {path.name for path in whole.iterdir()}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory_budget": 1 << 20}, r"--memory-budget 1.00 MiB is below the \d+\.\d+ MiB .* give more"),
        ({"memory_budget": BUDGET, "options": Options(scope="expert")}, "--scope expert .* leave one of them out"),
    ],
)
def test_budgets_that_cannot_be_met(tmp_path, changes, message):
    with pytest.raises(CompressionError, match=message):
        compress(MODEL, tmp_path / "out", settings(**changes))
    assert not list(tmp_path.iterdir())


# ---- the refit ----


@given(st.integers(0, 50), st.integers(1, 23), st.sampled_from([3, 30, 200]))
def test_refit_is_the_least_squares_solution(seed, keep, rows):
    """Against a float64 least-squares solver on the stacked problem."""
    full, base = random_expert(seed), random_expert(seed + 1000)
    inputs = torch.randn(rows, 16, generator=torch.Generator().manual_seed(seed))
    kept = torch.randperm(24, generator=torch.Generator().manual_seed(seed))[:keep].sort().values
    found = refit_down(inputs, full, base, kept, ACTIVATIONS["silu"])
    wide = [one.to(torch.float64) for one in (full, base)]
    own, shared = (hidden(inputs.double(), one) for one in wide)
    rest = torch.ones(24, dtype=torch.bool).index_fill(0, kept, False)
    error = own[:, rest] @ wide[0].down_DH[:, rest].T - shared[:, rest] @ wide[1].down_DH[:, rest].T
    values = own[:, kept]
    ridge = (RIDGE * (values.T @ values).diagonal().mean()).sqrt() * torch.eye(keep, dtype=torch.float64)
    stacked = torch.cat([values, ridge]), torch.cat([error, torch.zeros(keep, 16, dtype=torch.float64)])
    expected = torch.linalg.lstsq(*stacked).solution.T
    assert float((found - expected).norm() / expected.norm().clamp(min=1e-6)) < 1e-3


def test_refit_brings_the_output_nearer():
    experts = [random_expert(number) for number in range(6)]
    rows = [torch.randn(100, 16, generator=torch.Generator().manual_seed(number)) for number in range(6)]
    found = {refit: compress_layer(experts, rows, Options(rho=0.5, refit=refit)) for refit in (False, True)}

    def error(refit: bool) -> float:
        layer, total = found[refit], 0.0
        base = compress_layer(experts, rows, Options(rho=0.0))
        for number, inputs in enumerate(rows):
            mine, whole = layer.dense(number), base.dense(number)
            change = hidden(inputs, mine) @ mine.down_DH.T - hidden(inputs, whole) @ whole.down_DH.T
            total += float(change.square().sum())
        return total

    assert error(True) < 0.9 * error(False)
    for one, two in zip(found[False].residuals, found[True].residuals, strict=True):
        assert torch.equal(one.gate_HD, two.gate_HD)
        assert torch.equal(one.up_HD, two.up_HD)


def test_refit_of_an_expert_that_nothing_reaches():
    """Zeros in, nothing to fit: the columns stay."""
    full, base = random_expert(1), random_expert(2)
    assert not refit_down(torch.zeros(1, 16), full, base, torch.arange(5), ACTIVATIONS["silu"]).any()


# ---- the cache ----


def aligned(steps: list[str]) -> bool:
    return any("aligning" in step for step in steps)


def test_another_rho_finds_the_backbones(tmp_path):
    cache = tmp_path / "cache"
    runs: dict[str, list[str]] = {"first": [], "second": [], "damaged": []}
    for name, rho in (("first", 0.8), ("second", 0.9), ("damaged", 0.7)):
        if name == "damaged":
            for path in cache.iterdir():
                path.write_bytes(path.read_bytes()[:1000])
        chosen = settings(cache=cache, options=Options(rho=rho))
        compress(MODEL, tmp_path / name, chosen, lambda text, *_, steps=runs[name]: steps.append(text))
    assert {name: aligned(steps) for name, steps in runs.items()} == {"first": True, "second": False, "damaged": True}
    layers = [CompressedFolder(tmp_path / name).read_layer(1).backbone for name in runs]
    assert all(torch.equal(layers[0].cloud(), other.cloud()) for other in layers[1:])


def test_a_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "cache").write_text("a file")
    compress(MODEL, tmp_path / "out", settings(cache=tmp_path / "cache" / "folder", layers="0"))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["kept"].keys() == {"0"}


def test_keys(tmp_path):
    cache = BackboneCache(tmp_path)
    experts = [random_expert(number) for number in range(3)]
    key = cache.key(experts, Options())
    assert key == cache.key([replace(one) for one in experts], Options(rho=0.1, refit=True))
    nudged = experts[2].down_DH.clone()
    nudged[3, 5] += 1e-3
    others = [
        cache.key([*experts[:2], replace(experts[2], down_DH=nudged)], Options()),
        cache.key([*experts[1:], experts[0]], Options()),
        cache.key([one.to(torch.bfloat16) for one in experts], Options()),
        cache.key(experts, Options(backbone="mean")),
        cache.key(experts, Options(max_rounds=1)),
    ]
    assert len({key, *others}) == 6
    found = Backbone(experts[0], torch.arange(24).expand(3, 24))
    assert cache.load(key) is None
    cache.save(key, found)
    again = cache.load(key)
    assert again is not None
    assert torch.equal(again.transport_EH, found.transport_EH)
    assert torch.equal(again.weights.cloud(), experts[0].cloud())
