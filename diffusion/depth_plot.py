"""A picture of a depth file: similarity by layer and share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forebay.diffusion.depth import DepthTable, Rule
from forebay.diffusion.depth_file import DepthFile
from forebay.diffusion.errors import DiffusionError


def draw(file: DepthFile, path: Path) -> None:
    """Two heat maps, of the mean and of the least similar token, and the depths that follow by both rules.

    Raises:
        DiffusionError: matplotlib is missing, there are no similarities, or the picture cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise DiffusionError("--plot needs matplotlib; install it with `pip install forebay[bench]`") from None
    if not file.similarities:
        raise DiffusionError("--plot: the file has no similarities, only depths; make a new one from text")
    shares = [one.share for one in file.similarities]
    figure = Figure(figsize=(11, 2.2 + 0.16 * file.model.layers), layout="constrained")
    for axes, kind, title in zip(
        figure.subplots(1, 2), ("mean", "worst"), ("mean", "least similar token"), strict=True
    ):
        layers = list(zip(*(getattr(one, kind) for one in file.similarities), strict=True))
        image = axes.imshow(layers, aspect="auto", cmap="viridis", vmin=min(0.5, *map(min, layers)), vmax=1,
                            interpolation="nearest", origin="lower")  # fmt: skip
        axes.set_xticks(range(len(shares)), map(str, shares), rotation=90, fontsize=7)
        axes.set(xlabel="prefix, % of the sequence", ylabel="layer", title=f"similarity of keys and values, {title}")
        _draw_depths(axes, file, shares)
        figure.colorbar(image, ax=axes)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise DiffusionError(f"--plot {path}: {error}; give a file such as depth.png") from None


def _draw_depths(axes: Any, file: DepthFile, shares: list[int]) -> None:
    table = DepthTable(file.leading, file.model.layers, file.source)
    styles: dict[Rule, str] = {"paper": "w--", "boundary": "r-"}
    for rule, style in styles.items():
        depths = [table.depth(one, 100, 0, rule) - 0.5 for one in shares]
        axes.step(range(len(shares)), depths, style, where="mid", label=f"b, {rule} rule")
    axes.legend(loc="lower left", fontsize=7)
