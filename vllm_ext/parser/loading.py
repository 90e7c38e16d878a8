"""From the checkpoint's tensors to the parameters of vLLM's layer of experts.

Every model of vLLM has its own way of loading experts, and all of them understand the weights of one expert,
`experts.0.gate_proj.NAME`, which they hand to the loader of the parameter `w13_NAME` (gate and up) or `w2_NAME` (down).
So that is what the compressed tensors are called on their way: `experts.residual.up` travels as
`experts.0.up_proj.residual_up`. Which expert they claim to belong to has no meaning.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from forebay.compression.checkpoint import (
    BACKBONE,
    INDICES,
    NAMES,
    OFFSETS,
    SCALES,
    ParserConfig,
    check_indices,
    check_layer,
)
from forebay.compression.errors import CheckpointError
from forebay.compression.sharding import shard
from forebay.kernels.parser_moe.weights import ParserWeights

_DOWN = (BACKBONE[2], "residual.down", INDICES, OFFSETS, SCALES[2])


def _short(name: str) -> str:
    """`backbone.gate_proj.weight` -> `backbone_gate`, its scales -> `backbone_gate_scale`.

    Names that end in `weight_scale` are passed over by some models of vLLM.
    """
    return name.replace("_proj.weight", "").replace(".", "_")


def _part(name: str) -> str:
    return "down_proj" if name in _DOWN else "gate_proj" if "gate" in name else "up_proj"


RENAMED = {
    re.compile(rf"\.experts\.{re.escape(name)}$"): f".experts.0.{_part(name)}.{_short(name)}" for name in NAMES + SCALES
}
"""Names in the checkpoint -> names on their way through a model's `load_weights`."""


def parameters(parser: ParserConfig) -> dict[str, str]:
    """Parameters of the layer -> names in the checkpoint, in the order in which kernels take them."""
    return {f"{'w2' if name in _DOWN else 'w13'}_{_short(name)}": name for name in parser.names}


def parameter_dtype(name: str, parser: ParserConfig, params_dtype: torch.dtype) -> torch.dtype:
    """Type of the parameter for a name in the checkpoint."""
    if name in (INDICES, OFFSETS):
        return torch.int32
    if name in SCALES:
        return torch.float32
    return torch.int8 if name in BACKBONE and parser.backbone_dtype == "int8" else params_dtype


def check_folder(folder: Path, parser: ParserConfig) -> None:
    """Check, without reading a weight, that all compressed layers are there and keep units that exist.

    Raises:
        CheckpointError: naming the first tensor that is missing or wrong.
        ModelError: the folder is none that can be read.
    """
    from forebay.compression.source import ModelFolder

    model = ModelFolder(folder)
    for layer in parser.layers:
        prefix = model.family.prefix(layer)
        _refuse_missing(prefix, parser.names, model.names)
        indices, offsets = model.get(f"{prefix}.{INDICES}"), model.get(f"{prefix}.{OFFSETS}")
        check_indices(prefix, parser.kept[layer], parser.hidden_units, indices, offsets)


def _refuse_missing(prefix: str, wanted: Iterable[str], found: set[str]) -> None:
    for name in wanted:
        if f"{prefix}.{name}" not in found:
            raise CheckpointError(
                f"{prefix}.{name} is missing; the checkpoint is damaged, copy it again or compress the model again"
            )


class LayerLoader:
    """Collects the tensors of one layer, which come in any order, and makes this rank's weights of them.

    The share of a rank is known only when the kept units are, so the tensors wait for each other.
    """

    def __init__(self, prefix: str, layer: int, parser: ParserConfig) -> None:
        self.prefix = prefix
        self.layer = layer
        self.parser = parser
        self.found: dict[str, Tensor] = {}

    def add(self, name: str, tensor: Tensor) -> bool:
        """Take a tensor; whether it was the last.

        Raises:
            CheckpointError: it has come before.
        """
        full = f"{self.prefix}.{name}"
        if full in self.found:
            raise CheckpointError(f"{full} is in two files of the checkpoint; remove the one that does not belong")
        self.found[full] = tensor
        return len(self.found) == len(self.parser.names)

    def finish(self, rank: int, ranks: int) -> ParserWeights:
        """Check the layer and take this rank's part of it; what was collected is let go.

        Raises:
            CheckpointError: naming the first tensor that is missing or wrong.
        """
        _refuse_missing(self.prefix, self.parser.names, set(self.found))
        found, self.found = self.found, {}
        check_layer(self.prefix, self.layer, self.parser, found.__getitem__, set(found))
        return shard(ParserWeights(*(found[f"{self.prefix}.{name}"] for name in self.parser.names)), rank, ranks)
