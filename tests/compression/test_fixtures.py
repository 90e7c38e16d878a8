"""Everything agrees with the published implementation, which was run on two tiny models."""

from __future__ import annotations

import json

import pytest
import torch

from forebay.bench.moe.fixtures import FOLDER, MODELS, Reference, options
from forebay.compression.backbone import Backbone
from forebay.compression.experts import Expert
from forebay.compression.layer import Options, compress_layer, find_backbone, score, select
from forebay.compression.selection import select_expert, select_layer

LAYERS = [(model, layer) for model in MODELS for layer in Reference(model).layers]
CASES = json.loads((FOLDER / "selection_cases.json").read_text())["cases"]


@pytest.fixture(params=LAYERS, ids=lambda value: "-".join(map(str, value)))
def case(request):
    return Reference(request.param[0]), request.param[1]


@pytest.mark.parametrize("kind", ["barycenter", "mean"])
def test_backbone_and_alignment(case, kind):
    model, layer = case
    found = find_backbone(model.experts(layer), Options(backbone=kind))
    stored, prefix = model.tensors("backbone"), f"{kind}.layer{layer}"
    assert torch.equal(found.transport_EH.int(), stored[f"{prefix}.transport"])
    for name, weights in zip(
        ("gate", "up", "down"), (found.weights.gate_HD, found.weights.up_HD, found.weights.down_DH)
    ):
        torch.testing.assert_close(weights, stored[f"{prefix}.{name}"], atol=1e-6, rtol=0)
    if kind == "barycenter":  # theirs has one more, in which nothing moves
        theirs = {"qwen2moe_tiny": [2, 4], "deepseekv2_tiny": [2, 6]}[model.name][model.layers.index(layer)]
        assert found.rounds == theirs - 1


def test_every_option_keeps_the_same_units(case):
    model, layer = case
    experts, rows, routing = model.experts(layer), model.rows(layer), model.routing(layer)
    backbones = {kind: find_backbone(experts, Options(backbone=kind)) for kind in ("barycenter", "mean")}
    stored_scores = model.tensors("scores")
    scores = {}
    for name, by_rho in model.json("kept").items():
        for rho, layers in by_rho.items():
            chosen = options(name, float(rho))
            key = name.rsplit(".", 1)[0]
            if key not in scores:
                scores[key] = score(experts, backbones[chosen.backbone], rows, chosen, routing)
                expected = stored_scores[f"{key}.layer{layer}"]
                torch.testing.assert_close(
                    torch.stack(scores[key]), expected, rtol=1e-4, atol=1e-6 * float(expected.max())
                )
            kept = select(scores[key], chosen)
            assert [units.tolist() for units in kept] == layers[f"layer{layer}"]["kept"], (name, rho)
            assert sum(map(len, kept)) == layers[f"layer{layer}"]["total"]


@pytest.mark.parametrize("rho", ["0.9", "0.7"])
def test_residuals(case, rho):
    model, layer = case
    made = compress_layer(model.experts(layer), model.rows(layer), Options(rho=float(rho)))
    stored = model.tensors("residual_main")
    for expert, (residual, kept) in enumerate(zip(made.residuals, made.kept)):
        prefix = f"rho{rho}.layer{layer}.expert{expert}"
        assert torch.equal(kept.int(), stored[f"{prefix}.idx"])
        for name, values in zip(("gate", "up", "down"), (residual.gate_HD, residual.up_HD, residual.down_DH)):
            torch.testing.assert_close(values, stored[f"{prefix}.{name}"], atol=1e-6, rtol=0)


def test_bf16(case):
    """Transport and kept units are the same, the backbone but for single steps of bf16."""
    model, layer = case
    experts, rows = model.experts(layer, torch.bfloat16), model.rows(layer)
    stored, kept = model.tensors("bf16_main"), model.json("bf16_kept")
    names = [name for name in stored if name.startswith("barycenter") and f"layer{layer}" in name]
    transport = next(stored[name] for name in names if name.endswith("transport"))
    found = find_backbone(experts, Options())
    assert torch.equal(found.transport_EH.int(), transport.int())
    weights = [next(stored[name] for name in names if name.endswith(f".{part}")) for part in ("gate", "up", "down")]
    for mine, theirs in zip((found.weights.gate_HD, found.weights.up_HD, found.weights.down_DH), weights):
        torch.testing.assert_close(mine.float(), theirs.float(), rtol=2**-7, atol=0)
    same = Backbone(Expert(*weights), transport.long())
    scores = score(experts, same, rows, Options())
    for rho, layers in _by_rho(kept).items():
        made = select(scores, Options(rho=float(rho)))
        assert [units.tolist() for units in made] == layers[f"layer{layer}"]["kept"]


def _by_rho(kept):
    """`bf16_kept.json` has the rho at its top, or below the option's name."""
    return (
        kept if "0.9" in kept else next(value for value in kept.values() if isinstance(value, dict) and "0.9" in value)
    )


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_selection(case):
    scores = [torch.tensor(expert, dtype=torch.float32) for expert in case["scores_f32"]]
    choose = select_layer if case["scope"] == "layer" else select_expert
    kept = choose(scores, case["rho"], case["min_units"])
    assert [len(units) for units in kept] == case["counts"] or case["topk_tie_ambiguous"]
    assert sum(map(len, kept)) == case["total"]
    values = [expert[units].tolist() for expert, units in zip(scores, kept)]
    if case["topk_tie_ambiguous"]:
        theirs = [expert[torch.tensor(units, dtype=torch.long)].tolist() for expert, units in zip(scores, case["kept"])]
        assert [sorted(v) for v in values] == [sorted(v) for v in theirs]
    else:
        assert [units.tolist() for units in kept] == case["kept"]
