"""The picture of `forebay demo`: times to first token by document."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forebay.bench.demo import Row

ARMS = {
    "recomputed": "recomputed, no cache",
    "cold": "cold (first time)",
    "warm": "warm from the pool",
    "restarted": "warm after a restart",
    "device_hit": "still in the engine",
}


def plot_ttft(rows: Sequence[Row], path: Path) -> None:
    """Horizontal bars on a logarithmic axis, one group per document, written to `path` (PNG, SVG or PDF)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.2 + 1.5 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for arm, (name, label) in enumerate(ARMS.items()):
        places = [row + arm / (len(ARMS) + 1.5) for row in range(len(rows))]
        values = [getattr(row, name) for row in rows]
        bars = axes.barh(places, values, height=0.9 / (len(ARMS) + 1.5), label=label)
        axes.bar_label(bars, [f"{value:.2f} s" for value in values], padding=3, fontsize=8)
    axes.set_yticks([row + 0.3 for row in range(len(rows))], [f"{row.title}\n{row.tokens} tokens" for row in rows])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(right=2 * max(max(row.recomputed, row.cold) for row in rows))
    axes.set_xlabel("time to first token (s)")
    axes.legend(loc="lower right", fontsize=8)
    figure.savefig(path, dpi=150)
