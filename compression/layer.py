"""Compressing one MoE layer: backbone, importance, selection, residual (PARSER, arXiv 2609.00575)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from forebay.compression.backbone import MAX_ROUNDS, Backbone, Progress, barycenter, mean_backbone
from forebay.compression.experts import Expert
from forebay.compression.importance import ACTIVATIONS, IMPORTANCES
from forebay.compression.int8 import Int8Backbone
from forebay.compression.refit import refit_down
from forebay.compression.selection import MIN_UNITS, select_expert, select_layer


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How a layer is compressed. The defaults are the paper's main setting."""

    rho: float = 0.9
    """Share of the units that fall back to the backbone."""
    backbone: Literal["barycenter", "mean"] = "barycenter"
    importance: Literal["output", "wanda"] = "output"
    scope: Literal["layer", "expert"] = "layer"
    """Whether the units of a layer compete with each other, or those of each expert only."""
    backbone_dtype: Literal["model", "int8"] = "model"
    """What the backbone is stored in: the model's own type, or int8 with a scale for each row (ours)."""
    refit: bool = False
    """Fit the kept down columns to the calibration rows (ours)."""
    routing_weight: bool = False
    """Multiply the scores of an expert by the mean square of its router probability."""
    min_units: int = MIN_UNITS
    max_rounds: int = MAX_ROUNDS
    activation: str = "silu"


@dataclass(frozen=True, slots=True)
class CompressedLayer:
    """A backbone and, for every expert, the difference in the units that it keeps."""

    backbone: Expert
    """As it acts: float32 where it is stored in int8."""
    residuals: list[Expert]
    """Of each expert: gate (k, D), up (k, D), down (D, k)."""
    kept: list[Tensor]
    """Of each expert: its k units, ascending, numbered as in the backbone. int64."""
    int8: Int8Backbone | None = None
    """The backbone as it is stored, if that is int8."""

    def dense(self, expert: int) -> Expert:
        """The expert as it will act, in the type of the residuals."""
        gate, up, down = self.backbone.gate_HD.clone(), self.backbone.up_HD.clone(), self.backbone.down_DH.clone()
        rest, units = self.residuals[expert], self.kept[expert]
        gate[units] += rest.gate_HD
        up[units] += rest.up_HD
        down[:, units] += rest.down_DH
        return Expert(gate, up, down).to(rest.gate_HD.dtype)


def find_backbone(experts: Sequence[Expert], options: Options, progress: Progress | None = None) -> Backbone:
    """The backbone that the options ask for."""
    if options.backbone == "mean":
        return mean_backbone(experts)
    return barycenter(experts, max_rounds=options.max_rounds, progress=progress)


def as_stored(backbone: Backbone, options: Options) -> Backbone:
    """The backbone with what storing does to it: what residuals and scores refer to."""
    return backbone.in_int8() if options.backbone_dtype == "int8" else backbone


def score(
    experts: Sequence[Expert],
    backbone: Backbone,
    rows: Sequence[Tensor],
    options: Options,
    routing_E: Tensor | None = None,
) -> list[Tensor]:
    """Importance of every unit of every expert, (H,) each.

    The expert that is scored is backbone + residual as it can be stored: in bf16 not quite the original.

    Args:
        experts: as in the model.
        backbone: of these experts, as stored.
        rows: calibration inputs of each expert, (N, D).
        options: which importance.
        routing_E: mean squared router probability, where the options ask for it.
    """
    importance = partial(IMPORTANCES[options.importance], activation=ACTIVATIONS[options.activation])
    base = backbone.weights.to(torch.float32)
    scores = []
    for number, (expert, inputs) in enumerate(zip(experts, rows, strict=True)):
        residual = expert.permuted(backbone.transport_EH[number]) - backbone.weights
        stored = residual.to(expert.gate_HD.dtype).to(torch.float32)
        found = importance(inputs, base + stored, base)
        scores.append(found * routing_E[number] if options.routing_weight and routing_E is not None else found)
    return scores


def select(scores: Sequence[Tensor], options: Options) -> list[Tensor]:
    """The units that each expert keeps."""
    choose = select_layer if options.scope == "layer" else select_expert
    return choose(scores, options.rho, options.min_units)


def extract(
    experts: Sequence[Expert],
    backbone: Backbone,
    kept: Sequence[Tensor],
    rows: Sequence[Tensor] | None = None,
    activation: str = "silu",
) -> CompressedLayer:
    """Take the residuals of the kept units.

    Args:
        experts: as in the model.
        backbone: of these experts, as stored.
        kept: units of each expert.
        rows: calibration inputs of each expert, to fit the kept down columns to; None leaves them as they are.
        activation: of the gate, for the fit.
    """
    residuals = []
    for number, (expert, order, units) in enumerate(zip(experts, backbone.transport_EH, kept, strict=True)):
        residual = (expert.permuted(order[units]) - backbone.weights.permuted(units)).to(expert.gate_HD.dtype)
        if rows is not None and len(units):
            full, base = expert.permuted(order).to(torch.float32), backbone.weights.to(torch.float32)
            change = refit_down(rows[number], full, base, units, ACTIVATIONS[activation])
            residual = Expert(
                residual.gate_HD, residual.up_HD, (residual.down_DH.float() + change).to(residual.down_DH.dtype)
            )
        residuals.append(residual)
    return CompressedLayer(backbone.weights, residuals, list(kept), backbone.int8)


def compress_layer(
    experts: Sequence[Expert],
    rows: Sequence[Tensor],
    options: Options,
    routing_E: Tensor | None = None,
    backbone: Backbone | None = None,
) -> CompressedLayer:
    """All of it: see `find_backbone`, `as_stored`, `score`, `select`, `extract`."""
    found = as_stored(backbone or find_backbone(experts, options), options)
    kept = select(score(experts, found, rows, options, routing_E), options)
    return extract(experts, found, kept, rows if options.refit else None, options.activation)
