"""Running the parts of `forebay bench kv`, one after the other, and putting their numbers together."""

from __future__ import annotations

import contextlib
import importlib
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay.bench.kv.bars import BARS, Context, Measurement
from forebay.bench.machine import describe_machine, source_commit
from forebay.bench.rig import terminated_as_exit
from forebay.storage.errors import ConfigError, ForebayError


@dataclass(frozen=True, slots=True)
class Part:
    """Ratios that are measured together, by `measure` of a module of this package."""

    name: str
    ratios: tuple[str, ...]


PARTS = (
    Part("stripes", ("stripe_vs_sum", "stripe_vs_equal", "stripe_vs_hash", "any_prefix_balance")),
    Part("single", ("single_device_vs_fio",)),
    Part("checksum", ("checksum_overhead",)),
    Part("fs_tier", ("cpu_per_gb_vs_fs_tier", "blocked_vs_fs_tier")),
    Part("ttft", ("ttft_warm_vs_recompute", "ttft_warm_vs_device_hit")),
)
ROUNDS, QUICK_ROUNDS = 7, 3


def run(
    work: Path,
    *,
    quick: bool = False,
    rounds: int | None = None,
    only: Collection[str] = (),
    command: str = "",
    say: Callable[[str], None] = lambda text: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Measure, and return everything as one JSON-ready object.

    A part that cannot run here (no root, no fio, no vLLM) is reported under `errors`; its ratios are None.

    Args:
        work: folder on the disk to measure; a folder of ours is made in it and removed.
        quick: fewer rounds and less data.
        rounds: instead of the usual number.
        only: names of ratios or parts; all by default.
        command: for the record.
        say: told what is going on.
        progress: told how many parts of how many are done.

    Raises:
        ConfigError: `only` names something unknown, or `work` is no folder to write in.
    """
    wanted = select(only)
    ratios: dict[str, float | None] = {bar.name: None for bar in BARS}
    report: dict[str, Any] = {"benchmark": "kv", "ratios": ratios, "details": {}, "errors": {}, "part_seconds": {}}
    started = time.monotonic()
    with terminated_as_exit(), _folder(work) as folder:
        report["machine"] = describe_machine(folder)
        parts = [part for part in PARTS if not wanted.isdisjoint(part.ratios)]
        for number, part in enumerate(parts):
            progress(number, len(parts))
            context = _context(part, folder, quick, rounds, wanted, say)
            before = time.monotonic()
            try:
                found = _measure(part, context)
            except (ForebayError, OSError, ImportError) as error:
                report["errors"][part.name] = " ".join(str(error).split())
                continue
            finally:
                report["part_seconds"][part.name] = time.monotonic() - before
            ratios.update({name: value for name, value in found.ratios.items() if name in wanted})
            report["details"][part.name] = found.details
    report |= {"command": command, "commit": source_commit(), "quick": quick, "seconds": time.monotonic() - started}
    report["bars"] = _judge(ratios)
    report["ok"] = not report["errors"] and all(ratios[name] is not None for name in wanted)
    report["passed"] = report["ok"] and all(report["bars"][name]["passed"] for name in wanted)
    return report


def select(only: Collection[str]) -> frozenset[str]:
    """Names of ratios from names of ratios and parts.

    Raises:
        ConfigError: a name is unknown.
    """
    by_name = {bar.name: {bar.name} for bar in BARS} | {part.name: set(part.ratios) for part in PARTS}
    for name in only:
        if name not in by_name:
            raise ConfigError(f"--only {name!r} is unknown; known names are {', '.join(by_name)}")
    chosen = [by_name[name] for name in (only or [bar.name for bar in BARS])]
    return frozenset[str]().union(*chosen)


def _measure(part: Part, context: Context) -> Measurement:
    context.work.mkdir()
    try:
        result: Measurement = importlib.import_module(f"forebay.bench.kv.{part.name}").measure(context)
        return result
    finally:
        shutil.rmtree(context.work, ignore_errors=True)


def _context(
    part: Part, folder: Path, quick: bool, rounds: int | None, wanted: frozenset[str], say: Callable[[str], None]
) -> Context:
    return Context(
        work=folder / part.name,
        quick=quick,
        rounds=rounds or (QUICK_ROUNDS if quick else ROUNDS),
        wanted=wanted,
        say=lambda text: say(f"{part.name}: {text}"),
    )


@contextlib.contextmanager
def _folder(work: Path) -> Iterator[Path]:
    try:
        work.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="forebay-bench-", dir=work)).resolve()
    except OSError as error:
        raise ConfigError(f"--work {work}: {error.strerror}; give a folder that can be written") from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _judge(ratios: dict[str, float | None]) -> dict[str, Any]:
    return {
        bar.name: {
            "meaning": bar.meaning,
            "bar": bar.text,
            "passed": None if (value := ratios[bar.name]) is None else bar.passed(value),
        }
        for bar in BARS
    }
