"""The stored form of compressed layers, format version 1, and its reader.

A compressed checkpoint is a normal Hugging Face folder whose `config.json` has a `quantization_config` with
`quant_method: parser`, and in which the routed experts of a compressed layer are these tensors (E experts, H hidden
units, D model dimension, R kept units of all experts):

    {experts}.backbone.gate_proj.weight   (H, D)
    {experts}.backbone.up_proj.weight     (H, D)
    {experts}.backbone.down_proj.weight   (D, H)
    {experts}.residual.gate               (R, D)
    {experts}.residual.up                 (R, D)
    {experts}.residual.down               (R, D)     row r belongs to column indices[r] of down
    {experts}.residual.indices            (R,)       int32, ascending within an expert
    {experts}.residual.offsets            (E + 1,)   int32, expert e has rows offsets[e] to offsets[e + 1]

With `backbone_dtype: int8` the backbone is int8, and its rows are to be multiplied by

    {experts}.backbone.gate_proj.weight_scale   (H,)   float32, above 0
    {experts}.backbone.up_proj.weight_scale     (H,)
    {experts}.backbone.down_proj.weight_scale   (D,)

Units are numbered as in the backbone: the permutation of each expert is applied, nothing else is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_serializer
from torch import Tensor

from forebay.compression.errors import CheckpointError
from forebay.compression.experts import Expert
from forebay.compression.int8 import Int8Backbone
from forebay.compression.layer import CompressedLayer

FORMAT_VERSION = 1
QUANT_METHOD = "parser"
BACKBONE = ("backbone.gate_proj.weight", "backbone.up_proj.weight", "backbone.down_proj.weight")
RESIDUAL = ("residual.gate", "residual.up", "residual.down")
INDICES, OFFSETS = "residual.indices", "residual.offsets"
NAMES = (*BACKBONE, *RESIDUAL, INDICES, OFFSETS)
"""Tensors of every compressed layer, in the order in which kernels take them."""
SCALES = tuple(f"{name}_scale" for name in BACKBONE)
"""After those, where the backbone is int8."""

Get = Callable[[str], Tensor]
Count = Annotated[int, Field(ge=0)]


class ParserConfig(BaseModel):
    """`quantization_config` of a compressed checkpoint."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    quant_method: Literal["parser"] = "parser"
    format_version: Literal[1] = 1
    rho: float = Field(ge=0, le=1)
    """Share of the units that fell back to the backbone."""
    activation: str
    experts: int = Field(ge=1)
    """Routed experts of every compressed layer."""
    hidden_units: int = Field(ge=1)
    """Hidden units of an expert, and so of the backbone."""
    hidden_size: int = Field(ge=1)
    kept: dict[int, list[Count]]
    """Units that each expert keeps, by compressed layer."""
    made_with: dict[str, Any] = {}
    """Settings of the compression, for the reader's information."""
    backbone_dtype: Literal["int8"] | None = None
    """None is the type of the residuals. Left out then, so that a forebay that knows no other reads the folder."""

    @property
    def layers(self) -> list[int]:
        """Compressed layers, ascending."""
        return sorted(self.kept)

    @property
    def names(self) -> tuple[str, ...]:
        """Tensors of a compressed layer."""
        return NAMES if self.backbone_dtype is None else NAMES + SCALES

    @model_serializer(mode="wrap")
    def _leave_out(self, serialize: Callable[[Self], dict[str, Any]]) -> dict[str, Any]:
        found = serialize(self)
        if self.backbone_dtype is None:
            del found["backbone_dtype"]
        return found


def parse_config(found: Mapping[str, Any] | None) -> ParserConfig:
    """Read a `quantization_config`.

    Raises:
        CheckpointError: it is missing, of another method or version, or damaged.
    """
    if not found or found.get("quant_method") != QUANT_METHOD:
        method = (found or {}).get("quant_method")
        raise CheckpointError(f"quant_method is {method!r}, not 'parser': this is no checkpoint of forebay compress")
    if found.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"format_version {found.get('format_version')!r} is not the {FORMAT_VERSION} that this forebay reads; "
            f"use the forebay that wrote it, or compress the model again"
        )
    try:
        return ParserConfig.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise CheckpointError(f"quantization_config.{place}: {first['msg']}") from None


def to_tensors(prefix: str, layer: CompressedLayer) -> dict[str, Tensor]:
    """A layer as it is stored."""
    backbone = layer.int8.weights if layer.int8 else layer.backbone
    values = [backbone.gate_HD, backbone.up_HD, backbone.down_DH]
    values.append(torch.cat([rest.gate_HD for rest in layer.residuals]))
    values.append(torch.cat([rest.up_HD for rest in layer.residuals]))
    values.append(torch.cat([rest.down_DH.T for rest in layer.residuals]))
    counts = torch.tensor([0] + [len(units) for units in layer.kept])
    values += [torch.cat(layer.kept).int(), counts.cumsum(0).int()]
    values += layer.int8.scales if layer.int8 else ()
    return {f"{prefix}.{name}": value.contiguous() for name, value in zip(NAMES + SCALES, values, strict=False)}


def from_tensors(prefix: str, get: Get) -> CompressedLayer:
    """The inverse of `to_tensors`, of a layer that `check_layer` found sound."""
    gate, up, down, rest_gate, rest_up, rest_down, indices, offsets = [get(f"{prefix}.{name}") for name in NAMES]
    sizes = offsets.diff().tolist()
    parts = zip(rest_gate.split(sizes), rest_up.split(sizes), rest_down.split(sizes), strict=True)
    residuals = [Expert(one, two, three.T) for one, two, three in parts]
    kept = [units.long() for units in indices.split(sizes)]
    backbone = Expert(gate, up, down)
    if gate.dtype is not torch.int8:
        return CompressedLayer(backbone, residuals, kept)
    int8 = Int8Backbone(backbone, *(get(f"{prefix}.{name}") for name in SCALES))
    return CompressedLayer(int8.dequantized(), residuals, kept, int8)


def check_layer(prefix: str, layer: int, config: ParserConfig, get: Get, names: set[str]) -> None:
    """Check every shape, type and index of one layer.

    Raises:
        CheckpointError: naming the first tensor that is missing or wrong.
    """
    missing = [name for name in config.names if f"{prefix}.{name}" not in names]
    if missing:
        raise CheckpointError(f"{prefix}.{missing[0]} is missing; the checkpoint is damaged, compress the model again")
    kept = config.kept[layer]
    if len(kept) != config.experts:
        raise CheckpointError(f"quantization_config.kept.{layer} has {len(kept)} experts, not {config.experts}")
    rows, units, size = sum(kept), config.hidden_units, config.hidden_size
    shapes = [(units, size), (units, size), (size, units), *[(rows, size)] * 3, (rows,), (config.experts + 1,)]
    tensors = {name: get(f"{prefix}.{name}") for name in config.names}
    for (name, tensor), shape in zip(tensors.items(), [*shapes, (units,), (units,), (size,)], strict=False):
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"{prefix}.{name} has shape {tuple(tensor.shape)}, not {shape}")
    int8 = () if config.backbone_dtype is None else BACKBONE
    for name in (*BACKBONE, *RESIDUAL):
        if name not in int8 and not _finite(tensors[name]):
            raise CheckpointError(f"{prefix}.{name} has values that are no finite numbers")
    for name in int8:
        _check_int8(prefix, name, tensors)
    check_indices(prefix, kept, units, tensors[INDICES], tensors[OFFSETS])


def _finite(tensor: Tensor) -> bool:
    return tensor.dtype.is_floating_point and bool(tensor.isfinite().all())


def _check_int8(prefix: str, name: str, tensors: Mapping[str, Tensor]) -> None:
    if tensors[name].dtype is not torch.int8:
        raise CheckpointError(f"{prefix}.{name} is {tensors[name].dtype}, not the int8 of quantization_config")
    scale = tensors[f"{name}_scale"]
    if scale.dtype is not torch.float32 or not _finite(scale) or not bool((scale > 0).all()):
        raise CheckpointError(f"{prefix}.{name}_scale is {scale.dtype}; it must be finite float32 above 0")


def check_indices(prefix: str, kept: list[int], units: int, indices: Tensor, offsets: Tensor) -> None:
    """Check which units the experts of one layer keep: cheap, for these two tensors are small.

    Raises:
        CheckpointError: naming the tensor and the wrong unit.
    """
    for name, tensor in ((INDICES, indices), (OFFSETS, offsets)):
        if tensor.dtype is not torch.int32:
            raise CheckpointError(f"{prefix}.{name} is {tensor.dtype}, not int32")
    expected = torch.tensor([0, *kept]).cumsum(0)
    if not torch.equal(offsets.long(), expected):
        raise CheckpointError(f"{prefix}.{OFFSETS} does not agree with the counts in quantization_config.kept")
    if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < units:
        worst = int(indices.max()) if int(indices.max()) >= units else int(indices.min())
        raise CheckpointError(f"{prefix}.{INDICES} has {worst}, outside the backbone's 0 to {units - 1}")
    inside = torch.ones(max(len(indices) - 1, 0), dtype=torch.bool)
    starts = offsets[1:-1].long()
    inside[starts[(starts > 0) & (starts < len(indices))] - 1] = False
    wrong = (inside & (indices.diff() <= 0)).nonzero()
    if len(wrong):
        row = int(wrong[0]) + 1
        problem = "twice in" if indices[row] == indices[row - 1] else "out of order in"
        expert = int(torch.searchsorted(offsets.long(), torch.tensor(row), right=True)) - 1
        raise CheckpointError(f"{prefix}.{INDICES}: unit {int(indices[row])} is {problem} expert {expert}")
