"""The report of a run on a GPU, for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

GB = 1e9


def show(report: Mapping[str, Any]) -> RenderableType:
    """Everything in the report."""
    return Group(*_parts(report))


def _parts(report: Mapping[str, Any]) -> Iterator[RenderableType]:
    yield _card(report)
    checks = report["checks"]
    yield f"correct: {sum(check['ok'] for check in checks)} of {len(checks)} checks"
    yield from (f"[bold red]wrong:[/] {escape(str(check))}" for check in checks if not check["ok"])
    if report["rows"]:
        yield _rows(report)
    for name, why in report["dense_passed_over"].items():
        yield f"[dim]not used for the dense layer: {name} ({escape(why)})[/]"
    if report["suggested"]:
        yield _suggested(report["suggested"])
    if report["left_out"]:
        yield f"[yellow]left out:[/] {'; '.join(report['left_out'])}"
    yield from (f"[bold red]error:[/] {escape(f'{name}: {error}')}" for name, error in report["errors"].items())


def _card(report: Mapping[str, Any]) -> str:
    card, roof = report["card"], report["roof"]
    parts = [f"[bold]{card['name']}[/]"]
    if "memory_bytes" in card:
        memory = f"{card['memory_bytes'] / 2**30:.0f} GiB"
        parts += [f"compute capability {card['compute_capability']}", memory, f"CUDA {card['cuda']}"]
    parts += [f"{name} {version}" for name, version in card["versions"].items() if version]
    if roof:
        copies, products = roof["bytes_per_second"] / GB, roof["operations_per_second"] / 1e12
        parts += [f"copies {copies:.0f} GB/s", f"multiplies {products:.1f} TFLOP/s in {report['dtype']}"]
    return ", ".join(parts)


def _table(title: str, left: int, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number < left else "right", overflow="fold")
    return table


def _rows(report: Mapping[str, Any]) -> Table:
    table = _table(
        f"One layer at rho {report['rho']}, {report['dtype']}, microseconds",
        1, "layer", "tokens", "dense", "floor", "forebay", "floor", "dense / forebay", "GB/s", "TFLOP/s", "dense by",
    )  # fmt: skip
    for row in report["rows"]:
        dense, ours = row["arms"]["dense"], row["arms"]["forebay"]
        times = (part for arm in (dense, ours) for part in (arm["seconds"]["median"], arm["floor_seconds"]))
        table.add_row(
            row["layer"], str(row["tokens"]), *(f"{time * 1e6:.1f}" for time in times),
            f"{row['ratio']:.2f}" if row["ok"] else "[bold red]wrong[/]",
            f"{ours['bytes_per_second'] / GB:.0f}", f"{ours['operations_per_second'] / 1e12:.1f}",
            escape(f"{row['dense']}, as {row['launched']}"),
        )  # fmt: skip
    return table


def _suggested(rows: list[Mapping[str, Any]]) -> Table:
    table = _table(
        "Block sizes to put first (times are relative to each layer's best)",
        1, "candidates", "r", "d", "warps", "stages", "takes", "the default takes", "layers and buckets",
    )  # fmt: skip
    for row in rows:
        blocks = (str(row["first"][name]) for name in ("r", "d", "warps", "stages"))
        table.add_row(row["list"], *blocks, f"{row['takes']:.2f}", f"{row['default_takes']:.2f}", str(row["rows"]))
    return table
