"""Which block sizes win on this card: every candidate of `triton_tuning` is timed where a forward pass asks for one."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

import torch

from forebay.bench.moe.gpu_clock import Budget
from forebay.bench.moe.layer import Sizes
from forebay.kernels.parser_moe import triton_tuning
from forebay.kernels.parser_moe.triton_tuning import Blocks

Key = tuple[object, ...]


class Choose(Protocol):
    """The form of `triton_tuning.choose`."""

    def __call__(self, key: Key, candidates: Sequence[Blocks], launch: Callable[[Blocks], object]) -> Blocks: ...  # noqa: D102


@contextlib.contextmanager
def choosing(choose: Choose) -> Iterator[None]:
    """Let `choose` decide on block sizes instead of `triton_tuning.choose`."""
    before = triton_tuning.choose
    triton_tuning.choose = choose
    try:
        yield
    finally:
        triton_tuning.choose = before


def default(key: Key, candidates: Sequence[Blocks], launch: Callable[[Blocks], object]) -> Blocks:
    """The first of the candidates, without timing any."""
    return candidates[0]


class Sweep:
    """Chooses like `triton_tuning`, and keeps every time in `rows`."""

    def __init__(self, budget: Budget, names: Mapping[Sizes, str]) -> None:
        self.budget = budget
        self.names = names
        self.rows: list[dict[str, Any]] = []
        """One per kernel, layer and bucket of tokens, ready for JSON; a candidate without a time does not run here."""
        self._chosen: dict[Key, Blocks] = {}

    def choose(self, key: Key, candidates: Sequence[Blocks], launch: Callable[[Blocks], object]) -> Blocks:
        """The fastest candidate for `key`; the first one when no time is left, or while a graph is captured."""
        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if key not in self._chosen and not capturing and not self.budget.over:
            times = {blocks: _milliseconds(blocks, launch) for blocks in candidates}
            best = min(times, key=times.__getitem__)
            if times[best] < math.inf:  # else the caller's own launch tells what is wrong
                self._chosen[key] = best
                self.rows.append(self._row(key, times))
        return self._chosen.get(key, candidates[0])

    def _row(self, key: Key, times: Mapping[Blocks, float]) -> dict[str, Any]:
        kernel, rows, *numbers, dtype, _ = key
        assert isinstance(rows, int)
        sizes = Sizes(*(number for number in numbers if isinstance(number, int)))
        return {
            "kernel": kernel,
            "bucket": f"up to {rows} pairs" if rows > 0 else f"blocks of {-rows} pairs",
            "layer": self.names.get(sizes, str(sizes)),
            "dtype": str(dtype),
            "candidates": [{**asdict(blocks), "milliseconds": time} for blocks, time in times.items()],
            "best": asdict(self._chosen[key]),
            "default_takes": next(iter(times.values())) / min(times.values()),
        }


def _milliseconds(blocks: Blocks, launch: Callable[[Blocks], object]) -> float:
    try:
        return triton_tuning.milliseconds(blocks, launch)
    except Exception:  # a compiler that refuses one candidate must not end the run
        return math.inf


def suggest(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each list of candidates in `triton_tuning`, the one to put first.

    It has the least time, over the layers' own best and as a geometric mean over them.
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_block = not row["kernel"].endswith("_few")
        groups.setdefault(f"{row['kernel']}, {row['bucket']}" if by_block else row["kernel"], []).append(row)
    return [{"list": name, **_first(group)} for name, group in groups.items()]


def _first(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    logs: dict[tuple[int, ...], list[float]] = {}
    for row in rows:
        best = min(candidate["milliseconds"] for candidate in row["candidates"])
        for candidate in row["candidates"]:
            blocks = tuple(candidate[name] for name in ("r", "d", "warps", "stages"))
            logs.setdefault(blocks, []).append(math.log(candidate["milliseconds"] / best))
    means = {blocks: math.exp(sum(values) / len(values)) for blocks, values in logs.items()}
    first = min(means, key=means.__getitem__)
    return {
        "first": dict(zip(("r", "d", "warps", "stages"), first, strict=True)),
        "takes": means[first],
        "default_takes": next(iter(means.values())),
        "rows": len(rows),
    }
