"""The report of a run on a GPU, in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

Report = Mapping[str, Any]


def show(report: Report) -> str:
    """Everything in the report."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Report) -> Iterator[str]:
    yield f"### {report['card']['name']}"
    yield ""
    yield from _facts(report)
    for title, table in (("Whole generations", _arms), ("Many requests", _batches), ("Single passes", _passes)):
        rows = list(table(report))
        if len(rows) > 1:
            yield from ("", f"**{title}**", "", *_table(rows))
    for one in report["passes"]:
        if one.get("host_waits"):
            lines = ", ".join(f"{line} ({count})" for line, count in one["host_waits"].items())
            yield from ("", f"Host waits in a pass ({one['pass']}): {lines}.")
    yield from _problems(report)


def _facts(report: Report) -> Iterator[str]:
    card, model, settings, roof = report["card"], report["model"], report["settings"], report["roof"]
    parts = [f"{name} {version}" for name, version in card["versions"].items() if version and name != "vllm"]
    if "memory_bytes" in card:
        parts.insert(0, f"{card['memory_bytes'] / 2**30:.0f} GiB, compute capability {card['compute_capability']}")
    if roof:
        copies, products = roof["bytes_per_second"] / 1e9, roof["operations_per_second"] / 1e12
        parts += [f"copies {copies:.0f} GB/s", f"multiplies {products:.1f} TFLOP/s"]
    yield "; ".join(parts) + "."
    yield (
        f"Random weights in {report['dtype'].removeprefix('torch.')}: {model['layers']} layers, hidden "
        f"{model['hidden']}, intermediate {model['intermediate']}, {model['heads']} heads of {model['head_size']}, "
        f"vocabulary {model['vocabulary']}; prompt P + {report['user']}, {settings['length']} tokens in "
        f"{settings['steps']} steps, blocks of {settings['block']}, T = {settings['refresh']}."
    )
    commit = report["commit"][:12] or "unknown"
    yield f"`{report.get('command', '')}`, commit {commit}, {report.get('seconds', 0):.0f} s."
    if report["facts"]:
        yield "; ".join(f"{name}: {value}" for name, value in report["facts"].items()) + "."
    checks = report["checks"]
    yield f"Right: {sum(one['ok'] for one in checks)} of {len(checks)} checks. Random weights tell nothing of quality."


def _arms(report: Report) -> Iterator[Sequence[str]]:
    yield "P", "arm", "b", "seconds", "tokens/s", "x none", "x intra", "x dual", "of the roof", "rounds"
    for row in report["rows"]:
        taken, others = row["seconds"], ("vs_none", "vs_intra", "vs_fast_dllm_dual")
        yield (
            str(row["prefix"]), row["arm"], str(row["depth"]), f"{taken['median']:.3g}",
            f"{row['tokens_per_second']:.0f}", *(_times(row[name]) for name in others),
            f"{row['of_floor']:.0%}", str(len(taken["rounds"])),
        )  # fmt: skip


def _batches(report: Report) -> Iterator[Sequence[str]]:
    yield "P", "arm", "b", "requests", "tokens/s one at a time", "tokens/s all at once", "ratio", "rounds"
    for row in report["batches"]:
        yield (
            str(row["prefix"]), row["arm"], str(row["depth"]), str(row["requests"]),
            f"{row['tokens_per_second_one']:.0f}", f"{row['tokens_per_second_all']:.0f}", _times(row["ratio"]),
            str(row["rounds"]),
        )  # fmt: skip


def _passes(report: Report) -> Iterator[Sequence[str]]:
    yield "P", "pass", "ms", "at best", "bound by", "in kernels", "kernels", "GPU idle", "longest kernel"
    for row in report["passes"]:
        kernels = row.get("kernel_seconds")
        longest = row["longest"][0] if row.get("longest") else None
        yield (
            str(row["prefix"]), row["pass"], f"{row['seconds'] * 1e3:.2f}", f"{row['floor_seconds'] * 1e3:.2f}",
            row["bound_by"], "" if kernels is None else f"{kernels * 1e3:.2f}", str(row.get("kernels", "")),
            f"{row['idle_share']:.0%}" if "idle_share" in row else "",
            f"{longest['name']}: {longest['seconds'] * 1e3:.2f}".replace("|", "/") if longest else "",
        )  # fmt: skip


def _problems(report: Report) -> Iterator[str]:
    for one in report["checks"]:
        if not one["ok"]:
            yield from ("", f"WRONG: {one}")
    for name, error in report["errors"].items():
        yield from ("", f"ERROR: {name}: {error}")
    if report["left_out"]:
        yield from ("", f"Left out: {'; '.join(report['left_out'])}.")


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _table(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """The first row is the heading; all columns but the first two to the right."""
    head, *body = rows
    yield _row(head)
    yield _row(["---", "---", *["---:"] * (len(head) - 2)])
    yield from (_row(one) for one in body)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
