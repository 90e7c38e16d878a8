"""Pictures of results. matplotlib is imported only here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forebay.bench.kv.bars import BARS
from forebay.storage.errors import ForebayError

GOOD, BAD, LINE = "#2f7d4f", "#b3402a", "#333333"


class PlotError(ForebayError):
    """A picture cannot be drawn."""


def new_figure(width: float, height: float) -> Any:
    """An empty figure of so many inches, without a display.

    Raises:
        PlotError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise PlotError("--plot needs matplotlib; install it with `pip install forebay[bench]`") from None
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Any, path: Path) -> None:
    """Write a figure; the suffix decides the format.

    Raises:
        PlotError: the file cannot be written, or the format is unknown.
    """
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise PlotError(f"--plot {path}: {error}") from None


def plot_bars(report: Mapping[str, Any], path: Path) -> None:
    """Every ratio against its bar, on a logarithmic axis where the bar is 1 and better is to the right."""
    rows = [(bar, report["ratios"][bar.name]) for bar in BARS if report["ratios"][bar.name]]
    figure = new_figure(9, 1.2 + 0.45 * len(rows))
    axes = figure.add_subplot()
    for place, (bar, value) in enumerate(reversed(rows)):
        better = value / bar.limit if bar.at_least else bar.limit / value
        axes.barh(place, better - 1, left=1, color=GOOD if bar.passed(value) else BAD, height=0.6)
        axes.annotate(
            f"{value:.3g} (bar {bar.text})", (max(better, 1), place), (4, 0), textcoords="offset points", va="center"
        )
    axes.axvline(1, color=LINE, linewidth=1)
    axes.set_xscale("log")
    axes.margins(x=0.35)
    axes.set_yticks(range(len(rows)), [bar.name for bar, _ in reversed(rows)])
    axes.set_xlabel("how much better than the bar")
    axes.set_title("forebay bench kv")
    save(figure, path)
