"""What PARSER's choices are worth: perplexity against its ablations at equal memory, on a small trained model.

The model has 16 experts of which 2 are used, and was trained on prose and code. All its layers are compressed in four
ways: as the paper does; with wanda's scores (`wanda`); with the same share of units for every expert (`local`); with
the plain mean as the backbone (`mean`). What goes beyond the paper is measured in the same way.

The gap is the perplexity above the uncompressed model's on text that was not used for calibration; a ratio is the
ablation's gap over PARSER's, the median over rho.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forebay.bench.suite import Context, Measurement
from forebay.compression.backbone import Backbone
from forebay.compression.budget import Sizes, units_within
from forebay.compression.calibration import LayerStatistics
from forebay.compression.layer import Options, as_stored, extract, find_backbone, score, select
from forebay.compression.selection import select_budget, target
from forebay.compression.source import ModelFolder
from forebay.compression.streaming import LayerwiseModel
from forebay.storage.errors import ForebayError

MODEL = Path(__file__).parents[2] / "tests/assets/tinymoe-qwen3-8m"
RHOS = (0.7, 0.8, 0.9)
QUICK_RHO = 0.8
"""At which the quick form measures what goes beyond the paper."""
ABLATIONS: dict[str, dict[str, Any]] = {
    "PARSER": {},
    "wanda": {"importance": "wanda"},
    "local": {"scope": "expert"},
    "mean": {"backbone": "mean"},
}
BEYOND: dict[str, dict[str, Any]] = {
    "memory budget": {"budget": True},
    "refit": {"refit": True},
    "memory budget and refit": {"budget": True, "refit": True},
    "int8 backbone, equal bytes": {"backbone_dtype": "int8", "equal_bytes": True},
}
LONG = {"int8 backbone, same units": {"backbone_dtype": "int8"}}
"""In the long form only."""
OURS = {"budget", "equal_bytes"}
"""Which of these are no options of a layer."""
LENGTH = 256
CALIBRATION, EVALUATION, QUICK_EVALUATION = 64, 160, 24
"""Sequences of `LENGTH` tokens."""
ROWS = 1024


def measure(context: Context) -> Measurement:
    """The three ratios.

    Raises:
        ForebayError: the model is not there: it comes with the sources, not with the installed package.
    """
    if not MODEL.is_dir():
        raise ForebayError(f"{MODEL} is missing; run from a clone of the repository")
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    wanted = QUICK_EVALUATION if context.quick else EVALUATION
    sequences = _sequences(tokenizer, CALIBRATION + wanted)
    context.say("calibrating")
    inputs = _calibrate(ModelFolder(MODEL), sequences[:CALIBRATION])
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    dense = _perplexity(model, sequences[CALIBRATION:])
    gaps: dict[str, dict[float, float]] = {name: {} for name in (*ABLATIONS, *BEYOND, *LONG)}
    scored: Scored = {}
    for rho in RHOS:
        beyond = BEYOND | LONG if not context.quick else BEYOND if rho == QUICK_RHO else {}
        for name, changes in (ABLATIONS | beyond).items():
            context.say(f"rho {rho:g}: {name}")
            options = replace(Options(rho=rho), **{key: value for key, value in changes.items() if key not in OURS})
            if "equal_bytes" in changes:
                options = replace(options, rho=_equal_bytes(rho))
            _compress(model, inputs, options, scored, budget="budget" in changes)
            gaps[name][rho] = _perplexity(model, sequences[CALIBRATION:]) - dense

    def over_ours(name: str) -> float:
        return statistics.median(gap / gaps["PARSER"][rho] for rho, gap in gaps[name].items())

    details = {"model": MODEL.name, "dense_perplexity": dense, "gaps": gaps, "sequences": wanted}
    details["gap_beyond_the_paper"] = {name: over_ours(name) for name in gaps if name not in ABLATIONS and gaps[name]}
    return Measurement({f"ppl_gap_vs_{name}": over_ours(name) for name in ABLATIONS if name != "PARSER"}, details)


def _sequences(tokenizer: Any, count: int) -> Tensor:
    """The interpreter's reference manual and library, one sequence of every document, shuffled."""
    import inspect
    import pydoc_data.topics as manual

    texts = [text for _, text in sorted(manual.topics.items())]
    library = sorted(Path(inspect.__file__).parent.glob("*.py"))
    texts += [path.read_text(errors="replace") for path in library]
    found: list[list[int]] = []
    for text in texts:
        tokens = tokenizer.encode(text[: 16 * LENGTH], add_special_tokens=False)
        found += [tokens[start : start + LENGTH] for start in range(0, len(tokens) - LENGTH + 1, LENGTH)][:2]
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0))[:count]
    return torch.tensor([found[int(number)] for number in order])


Inputs = list[tuple[int, list[Any], list[Tensor]]]
"""By layer: its number, its experts, and the calibration rows of each."""


def _calibrate(folder: ModelFolder, sequences: Tensor) -> Inputs:
    model = LayerwiseModel(folder)
    states, named = model.embed(sequences)
    found: Inputs = []
    for layer in range(folder.layers):
        statistics_ = LayerStatistics(layer, folder.family.expert_count(folder.config), capacity=ROWS)
        with torch.no_grad(), model.layer(layer) as module, statistics_.watch(module):
            states = module(states, **named)
        experts = [expert.to(torch.float32) for expert in folder.read_experts(layer)]
        found.append((layer, experts, statistics_.rows(allow_unseen=True)))
    return found


Scored = dict[tuple[str, str, str, int], tuple[Backbone, list[Tensor]]]
"""Backbone and scores by kind and type of backbone, kind of score, and layer: neither depends on rho."""


def _compress(model: Any, inputs: Inputs, options: Options, scored: Scored, *, budget: bool) -> None:
    """Put the dense reconstruction of the compressed experts into the model.

    Args:
        model: whose experts are replaced.
        inputs: of all layers.
        options: how.
        scored: what is known already; more is added.
        budget: whether the units of all layers compete for the same number of places.
    """
    found = []
    for layer, experts, rows in inputs:
        key = (options.backbone, options.backbone_dtype, options.importance, layer)
        if key not in scored:
            backbone = as_stored(find_backbone(experts, options), options)
            scored[key] = backbone, score(experts, backbone, rows, options)
        found.append(scored[key])
    kept = [select(scores, options) for _, scores in found]
    if budget:
        units = sum(len(units) for layer_kept in kept for units in layer_kept)
        kept = select_budget([scores for _, scores in found], units, options.min_units)
    for (layer, experts, rows), (backbone, _), chosen in zip(inputs, found, kept, strict=True):
        made = extract(experts, backbone, chosen, rows if options.refit else None, options.activation)
        home = model.model.layers[layer].mlp.experts
        for number in range(len(experts)):
            dense = made.dense(number)
            home.gate_up_proj.data[number] = torch.cat([dense.gate_HD, dense.up_HD])
            home.down_proj.data[number] = dense.down_DH


def _equal_bytes(rho: float) -> float:
    """The rho at which the model with int8 backbones weighs what it weighs at `rho` with backbones of its own type."""
    folder = ModelFolder(MODEL)
    plain, int8 = (Sizes.of(folder, folder.moe_layers(), Options(backbone_dtype=dtype)) for dtype in ("model", "int8"))
    units = plain.layers * plain.experts * plain.units
    return 1 - units_within(int8, plain.total(target(rho, units))) / units


def _perplexity(model: Any, sequences: Tensor) -> float:
    losses = [float(loss) for loss in _losses(model, sequences)]
    return float(torch.tensor(statistics.fmean(losses)).exp())


def _losses(model: Any, sequences: Tensor) -> Iterator[Tensor]:
    with torch.no_grad():
        for batch in sequences.split(16):
            yield model(batch, labels=batch).loss
