"""A benchmark of several parts: running them one after the other, and putting their numbers together."""

from __future__ import annotations

import contextlib
import importlib
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forebay.bench.machine import describe_machine, source_commit
from forebay.bench.rig import terminated_as_exit
from forebay.bench.rounds import Series
from forebay.compression.errors import CompressionError
from forebay.storage.errors import ConfigError, ForebayError

ROUNDS, QUICK_ROUNDS = 7, 3


@dataclass(frozen=True, slots=True)
class Bar:
    """A ratio and the least (or most) that it must be."""

    name: str
    meaning: str
    limit: float
    at_least: bool = True

    def passed(self, value: float) -> bool:
        """Whether `value` clears the bar."""
        return value >= self.limit if self.at_least else value <= self.limit

    @property
    def text(self) -> str:
        """`≥ 0.95`."""
        return f"{'≥' if self.at_least else '≤'} {self.limit:g}"


@dataclass(frozen=True, slots=True)
class Part:
    """Ratios that are measured together, by `measure` of one module."""

    name: str
    ratios: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Suite:
    """What `forebay bench NAME` measures."""

    name: str
    package: str
    """Its modules have the names of the parts, each with a function `measure(Context) -> Measurement`."""
    parts: tuple[Part, ...]
    bars: tuple[Bar, ...]
    long_only: frozenset[str] = frozenset()
    """Ratios that the quick form does not measure."""


@dataclass(slots=True)
class Measurement:
    """What one part of the benchmark found."""

    ratios: dict[str, float] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    """Everything behind the ratios: numbers with units, both arms, all rounds."""


@dataclass(frozen=True, slots=True)
class Context:
    """How a part is to measure."""

    work: Path
    """A folder of its own on the disk to use."""
    quick: bool
    rounds: int
    wanted: frozenset[str]
    """Names of ratios."""
    say: Callable[[str], None]
    """Tells the user what is going on."""


def medians(series: Mapping[str, Series]) -> dict[str, Any]:
    """JSON of several series."""
    return {name: values.to_json() for name, values in series.items()}


def run(
    suite: Suite,
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
        suite: what to measure.
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
    wanted = select(suite, only, quick)
    ratios: dict[str, float | None] = {bar.name: None for bar in suite.bars}
    report: dict[str, Any] = {
        "benchmark": suite.name,
        "ratios": ratios,
        "details": {},
        "errors": {},
        "part_seconds": {},
    }
    started = time.monotonic()
    with terminated_as_exit(), _folder(work) as folder:
        report["machine"] = describe_machine(folder)
        parts = [part for part in suite.parts if not wanted.isdisjoint(part.ratios)]
        for number, part in enumerate(parts):
            progress(number, len(parts))
            context = _context(part, folder, quick, rounds, wanted, say)
            before = time.monotonic()
            try:
                found = _measure(suite, part, context)
            except (ForebayError, CompressionError, OSError, ImportError) as error:
                report["errors"][part.name] = " ".join(str(error).split())
                continue
            finally:
                report["part_seconds"][part.name] = time.monotonic() - before
            ratios.update({name: value for name, value in found.ratios.items() if name in wanted})
            report["details"][part.name] = found.details
    report |= {"command": command, "commit": source_commit(), "quick": quick, "seconds": time.monotonic() - started}
    report["bars"] = _judge(suite, ratios)
    report["ok"] = not report["errors"] and all(ratios[name] is not None for name in wanted)
    report["passed"] = report["ok"] and all(report["bars"][name]["passed"] for name in wanted)
    return report


def select(suite: Suite, only: Collection[str], quick: bool = False) -> frozenset[str]:
    """Names of ratios from names of ratios and parts.

    Raises:
        ConfigError: a name is unknown, or nothing is left that the quick form measures.
    """
    by_name = {bar.name: {bar.name} for bar in suite.bars} | {part.name: set(part.ratios) for part in suite.parts}
    for name in only:
        if name not in by_name:
            raise ConfigError(f"--only {name!r} is unknown; known names are {', '.join(by_name)}")
    chosen = [by_name[name] for name in (only or [bar.name for bar in suite.bars])]
    found = frozenset[str]().union(*chosen)
    if quick and not found - suite.long_only:
        raise ConfigError(f"--only {','.join(only)} is measured in the long form only; leave out --quick")
    return found - suite.long_only if quick else found


def _measure(suite: Suite, part: Part, context: Context) -> Measurement:
    context.work.mkdir()
    try:
        result: Measurement = importlib.import_module(f"{suite.package}.{part.name}").measure(context)
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


def _judge(suite: Suite, ratios: dict[str, float | None]) -> dict[str, Any]:
    return {
        bar.name: {
            "meaning": bar.meaning,
            "bar": bar.text,
            "limit": bar.limit,
            "at_least": bar.at_least,
            "passed": None if (value := ratios[bar.name]) is None else bar.passed(value),
        }
        for bar in suite.bars
    }
