"""What a compression will weigh, and how many units fit into a budget of memory: without reading a weight."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.compression.errors import CompressionError
from forebay.compression.int8 import backbone_bytes
from forebay.compression.selection import target
from forebay.compression.source import ModelFolder, choose_layers

if TYPE_CHECKING:
    from forebay.compression.layer import Options
    from forebay.compression.run import Settings

INDEX_BYTES = 4
"""Of a kept unit's number, and of an expert's offset."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a model and of its compressed form, in bytes unless said otherwise."""

    model: int
    """All weights as they are."""
    experts: int
    """Routed experts of a layer, their number."""
    units: int
    """Hidden units of an expert, their number."""
    layers: int
    """Those to be compressed, their number."""
    unit: int
    """A row of gate, a row of up, a column of down."""
    backbone: int
    """Of one layer."""
    floor: int
    """Units that every expert keeps, their number."""

    @classmethod
    def of(cls, folder: ModelFolder, layers: list[int], options: Options) -> Sizes:
        """From the headers of the model's files."""
        names = folder.expert_names(layers[0])
        experts = folder.family.expert_count(folder.config)
        weights = sum(folder.bytes(name) for name in names)
        down = folder.size(names[-1]) // (experts if len(names) == 2 else 1)
        size = int(folder.config["hidden_size"])
        units = down // size
        unit = weights // (experts * units)
        return cls(
            model=sum(folder.bytes(name) for name in folder.names),
            experts=experts,
            units=units,
            layers=len(layers),
            unit=unit,
            backbone=backbone_bytes(units, size) if options.backbone_dtype == "int8" else units * unit,
            floor=min(options.min_units, units) * experts,
        )

    @property
    def dense_layer(self) -> int:
        """Routed experts of one layer."""
        return self.experts * self.units * self.unit

    @property
    def without_units(self) -> int:
        """The compressed model if no expert kept a unit."""
        layer = self.backbone + INDEX_BYTES * (self.experts + 1)
        return self.model - self.layers * (self.dense_layer - layer)

    def total(self, kept: int) -> int:
        """The compressed model when all layers together keep so many units."""
        return self.without_units + kept * (self.unit + INDEX_BYTES)


def units_within(sizes: Sizes, budget: int) -> int:
    """How many units all layers together may keep for all weights to fit into `budget` bytes.

    Raises:
        CompressionError: not even the floor fits.
    """
    least = sizes.total(sizes.layers * sizes.floor)
    if budget < least:
        raise CompressionError(
            f"--memory-budget {format_size(budget)} is below the {format_size(least)} that the other weights, "
            f"{sizes.layers} backbones and the floor of every expert need; give more, compress more layers with "
            f"--layers all, or lower --min-units"
        )
    fit = (budget - sizes.without_units) // (sizes.unit + INDEX_BYTES)
    return min(fit, sizes.layers * sizes.experts * sizes.units)


def format_size(count: int) -> str:
    """GiB, or MiB below one GiB."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.2f} MiB"


def estimate(source: Path, settings: Settings) -> dict[str, Any]:
    """What `compress` would make of a model, without calibration: the same units for every expert.

    Raises:
        CompressionError: the model cannot be compressed, or the budget is too small.
    """
    folder = ModelFolder(source)
    layers, options = choose_layers(settings.layers, folder), settings.options
    sizes = Sizes.of(folder, layers, options)
    all_units = sizes.experts * sizes.units
    if settings.memory_budget is None:
        kept = max(target(options.rho, all_units), sizes.floor)
    else:
        kept = round(units_within(sizes, settings.memory_budget) / sizes.layers)
    fraction = (kept + sizes.units) / all_units
    each = {"kept": kept, "units": all_units, "fewest": options.min_units, "median": kept / sizes.experts}
    return {
        "model_type": folder.config["model_type"],
        "rho": options.rho if settings.memory_budget is None else 1 - kept / all_units,
        "backbone_dtype": options.backbone_dtype,
        "bytes": sizes.total(kept * sizes.layers),
        "dense_bytes": sizes.model,
        "layers": [{"layer": layer, **each, "most": sizes.units, "fraction": fraction} for layer in layers],
    }
