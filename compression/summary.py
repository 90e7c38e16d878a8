"""What a compressed checkpoint keeps, in numbers and as a picture."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from forebay.compression.checkpoint import RESIDUAL
from forebay.compression.errors import CompressionError
from forebay.compression.restore import CompressedFolder


@dataclass(frozen=True, slots=True)
class LayerSummary:
    """One compressed layer. Units are counted over all experts."""

    layer: int
    kept: int
    units: int
    fewest: int
    median: float
    most: int
    parameters: int
    """Of the routed experts, index lists left out."""
    dense_parameters: int

    @property
    def fraction(self) -> float:
        """Parameters after / before: (1 - rho) + 1/E but for rounding."""
        return self.parameters / self.dense_parameters


def summarize(folder: CompressedFolder) -> list[LayerSummary]:
    """Of every compressed layer."""
    config = folder.parser
    unit = 3 * config.hidden_size
    return [
        LayerSummary(
            layer=layer,
            kept=sum(kept),
            units=config.experts * config.hidden_units,
            fewest=min(kept),
            median=statistics.median(kept),
            most=max(kept),
            parameters=unit * (sum(kept) + config.hidden_units),
            dense_parameters=unit * config.experts * config.hidden_units,
        )
        for layer, kept in sorted(config.kept.items())
    ]


def report(folder: CompressedFolder) -> dict[str, Any]:
    """Everything `inspect` tells, as plain data. Sizes are bytes."""
    layers = summarize(folder)
    sizes = {name: folder.bytes(name) for name in folder.names}
    width = folder.width(f"{folder.family.prefix(folder.parser.layers[0])}.{RESIDUAL[0]}")
    after = sum(sizes.values())
    dense = width * sum(layer.dense_parameters for layer in layers)
    before = after - sum(sizes[name] for name in folder.layer_names()) + dense
    return {
        "model_type": folder.config["model_type"],
        "rho": folder.parser.rho,
        "backbone_dtype": folder.parser.backbone_dtype or "model",
        "bytes": after,
        "dense_bytes": before,
        "layers": [asdict(layer) | {"fraction": layer.fraction} for layer in layers],
        "kept": folder.parser.kept,
        "made_with": folder.parser.made_with,
    }


def draw(folder: CompressedFolder, path: Path) -> None:
    """A heat map of kept units: a row for each layer, a column for each expert, sorted by how much they keep.

    Raises:
        CompressionError: matplotlib is missing, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise CompressionError("--plot needs matplotlib; install it with `pip install forebay[bench]`") from None
    config = folder.parser
    rows = [
        [count / config.hidden_units for count in sorted(config.kept[layer], reverse=True)] for layer in config.layers
    ]
    figure = Figure(figsize=(8, 1.2 + 0.28 * len(rows)), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(rows, aspect="auto", cmap="viridis", vmin=0, interpolation="nearest")
    axes.set_yticks(range(len(rows)), [str(layer) for layer in config.layers])
    axes.set(xlabel="experts, by units kept", ylabel="layer", title=f"share of units kept, rho {config.rho:g}")
    figure.colorbar(image, ax=axes)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise CompressionError(f"--plot {path}: {error}; give a file such as kept.png") from None
