"""Agreement with the published implementation, and of the score with its definition.

`fixture_mismatches` counts, over two models, all their MoE layers and 64 options each: permutations that differ,
experts whose list of kept units differs, and layers whose total differs.
"""

from __future__ import annotations

import torch

from forebay.bench.moe import fixtures
from forebay.bench.suite import Context, Measurement
from forebay.compression.backbone import Backbone
from forebay.compression.experts import Expert
from forebay.compression.importance import hidden, output_importance
from forebay.compression.layer import Options, find_backbone, score, select
from forebay.storage.errors import ForebayError

SCORED_UNITS = 64
"""Units of each expert that are recomputed one by one."""


def measure(context: Context) -> Measurement:
    """Both ratios.

    Raises:
        ForebayError: the fixtures are not there: they come with the sources, not with the installed package.
    """
    if not fixtures.FOLDER.is_dir():
        raise ForebayError(f"{fixtures.FOLDER} is missing; run from a clone of the repository")
    found = Measurement(details={"compared": 0, "permutations": 0, "kept_lists": 0, "totals": 0})
    worst = 0.0
    for name in fixtures.MODELS:
        model = fixtures.Reference(name)
        for layer in model.layers:
            context.say(f"{name}, layer {layer}: 64 options")
            _compare(model, layer, found)
            worst = max(worst, _score_error(model, layer))
    wrong = ("permutations", "kept_lists", "totals")
    found.ratios = {
        "fixture_mismatches": float(sum(found.details[what] for what in wrong)),
        "score_vs_bruteforce_relerr": worst,
    }
    return found


def _compare(model: fixtures.Reference, layer: int, found: Measurement) -> None:
    experts, rows, routing = model.experts(layer), model.rows(layer), model.routing(layer)
    backbones: dict[str, Backbone] = {}
    for kind in ("barycenter", "mean"):
        backbones[kind] = find_backbone(experts, Options(backbone=kind))
        theirs = model.tensors("backbone")[f"{kind}.layer{layer}.transport"]
        found.details["permutations"] += int((backbones[kind].transport_EH.int() != theirs).any(1).sum())
    scores = {}
    for name, by_rho in model.json("kept").items():
        for rho, layers in by_rho.items():
            options = fixtures.options(name, float(rho))
            key = name.rsplit(".", 1)[0]
            if key not in scores:
                scores[key] = score(experts, backbones[options.backbone], rows, options, routing)
            kept, theirs = select(scores[key], options), layers[f"layer{layer}"]
            lists = zip(kept, theirs["kept"], strict=True)
            found.details["kept_lists"] += sum(mine.tolist() != other for mine, other in lists)
            found.details["totals"] += sum(map(len, kept)) != theirs["total"]
            found.details["compared"] += 1


def _score_error(model: fixtures.Reference, layer: int) -> float:
    """The worst error of a layer's scores, relative to the expert's largest."""
    backbone = find_backbone(model.experts(layer), Options())
    worst = 0.0
    for number, expert in enumerate(model.experts(layer)):
        full, rows = expert.permuted(backbone.transport_EH[number]), model.rows(layer)[number]
        found = output_importance(rows, full, backbone.weights)
        expected = _directly(rows, full, backbone.weights)
        worst = max(worst, float((found[: len(expected)] - expected).abs().max() / expected.max()))
    return worst


def _directly(rows: torch.Tensor, full: Expert, base: Expert) -> torch.Tensor:
    """E |hf wf - hb wb|^2 by its definition, in float64."""
    wide = [one.to(torch.float64) for one in (full, base)]
    own, shared = (hidden(rows.double(), one) for one in wide)
    values = []
    for unit in range(min(SCORED_UNITS, own.shape[1])):
        change = own[:, unit, None] * wide[0].down_DH[:, unit] - shared[:, unit, None] * wide[1].down_DH[:, unit]
        values.append(change.square().sum(1).mean())
    return torch.stack(values)
