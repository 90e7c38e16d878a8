"""Pictures of results. matplotlib is imported only here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
    bars = {name: bar for name, bar in report["bars"].items() if report["ratios"][name] and bar["limit"]}
    figure = new_figure(9, 1.2 + 0.45 * len(bars))
    axes = figure.add_subplot()
    for place, (name, bar) in enumerate(reversed(bars.items())):
        value, limit = report["ratios"][name], bar["limit"]
        better = value / limit if bar["at_least"] else limit / value
        axes.barh(place, better - 1, left=1, color=GOOD if bar["passed"] else BAD, height=0.6)
        axes.annotate(
            f"{value:.3g} (bar {bar['bar']})", (max(better, 1), place), (4, 0), textcoords="offset points", va="center"
        )
    axes.axvline(1, color=LINE, linewidth=1)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, place: f"{value:g}x")
    axes.xaxis.set_minor_formatter("")
    axes.margins(x=0.35)
    axes.set_yticks(range(len(bars)), list(reversed(bars)))
    axes.set_xlabel("how much better than the bar")
    axes.set_title(f"forebay bench {report['benchmark']}")
    save(figure, path)


def plot_arms(report: Mapping[str, Any], path: Path) -> None:
    """Speed and agreement of every arm, and accuracy where it is known."""
    arms = report["arms"]
    shown = [("tokens_per_second", "tokens/s"), ("agreement", "agreement with no cache"), ("accuracy", "accuracy")]
    shown = [(key, label) for key, label in shown if key in next(iter(arms.values()))]
    figure = new_figure(3.5 * len(shown) + 1.5, 3.8)
    for axes, (key, label) in zip(figure.subplots(1, len(shown), sharey=True), shown, strict=True):
        axes.barh(list(arms), [arm[key] for arm in arms.values()], color=GOOD)
        axes.set_xlabel(label)
    figure.axes[0].invert_yaxis()
    figure.suptitle(f"{Path(report['model']).name}: {report['questions']} questions, {report['length']} tokens each")
    save(figure, path)


def plot_hit_rates(report: Mapping[str, Any], path: Path) -> None:
    """Hit rate over capacity, a line per policy, and what no capacity can exceed."""
    figure = new_figure(7, 4.5)
    axes = figure.add_subplot()
    for policy in sorted({row["policy"] for row in report["results"]}):
        rows = [row for row in report["results"] if row["policy"] == policy]
        gib = [row["capacity_bytes"] / 2**30 for row in rows]
        axes.plot(gib, [row["hit_rate_blocks"] for row in rows], marker="o", label=policy)
    axes.axhline(report["repeated_blocks"], color=LINE, linestyle="--", linewidth=1, label="never evicting")
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"capacity (GiB) at {report['kv_bytes_per_token'] / 1024:g} KiB per token")
    axes.set_ylabel("hit rate (blocks)")
    axes.set_title(f"{report['trace']}, {report['requests']} requests")
    axes.legend()
    save(figure, path)


def plot_replay(report: Mapping[str, Any], path: Path) -> None:
    """Load latency percentiles, and the bytes that each device gave."""
    figure = new_figure(9, 3.5)
    left, right = figure.subplots(1, 2)
    latencies = report["load_latency_seconds"]
    left.bar(list(latencies), [seconds * 1e3 for seconds in latencies.values()], color=GOOD)
    left.set_ylabel("load latency (ms)")
    devices = report["loaded_bytes_by_device"]
    right.bar(list(devices), [count / 1e9 for count in devices.values()], color=GOOD)
    right.set_ylabel("loaded (GB)")
    figure.suptitle(f"{report['trace']}: {report['hit_rate_blocks']:.1%} of the blocks hit")
    save(figure, path)
