"""How many layers may reuse a shared prefix: tables from the prefix's share of a request to a depth b.

A table is made by comparing, layer by layer, the keys and values of prefixes alone with those of the same prefixes in
whole sequences (BiCache, arXiv 2606.07571). Two rules turn similarities into a depth:

* `paper`: b is the number of leading layers that are similar enough;
* `boundary` (ours, the default): one less, at least 1. The state that is handed to layer b was made by the prefix
  alone, and so fixes the prefix's keys and values of layer b too: it must be similar enough itself. Where all layers
  are, nothing is handed on, and both rules reuse all of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from torch.nn import functional

from forebay.diffusion.transformer import KeyValues

Rule = Literal["paper", "boundary"]
TAU = 0.97
"""Similarity above which a layer counts as stable (the paper's main setting)."""


@dataclass(frozen=True, slots=True)
class DepthTable:
    """Depths by share of the request, in percent."""

    leading: Mapping[int, int]
    """From which share on how many leading layers are similar: both ascending."""
    layers: int
    """Of the model."""
    source: str
    """Where it comes from."""

    def depth(self, prefix: int, prompt: int, generation: int, rule: Rule = "boundary") -> int:
        """b for a request, from 1 to the number of layers.

        Args:
            prefix: tokens of the shared prefix.
            prompt: tokens of the whole prompt, the prefix included.
            generation: tokens to be generated: they count as part of the request, as published.
            rule: see above.
        """
        shares = sorted(self.leading)
        place = bisect_right(shares, share(prefix, prompt + generation)) - 1
        leading = self.leading[shares[place]] if place >= 0 else 1
        if rule == "paper" or leading == self.layers:
            return max(1, leading)
        return max(1, leading - 1)

    def depths(self, rule: Rule = "boundary") -> list[int]:
        """All that any request may get, ascending: what states of a prefix are worth keeping for."""
        found = {1} | {self.depth(one, 100, 0, rule) for one in range(101)}
        return sorted(found)


def share(prefix: int, total: int) -> int:
    """r: per cent of a request that is prefix, half to even."""
    return round(100 * prefix / total)


def similarity(alone: Sequence[KeyValues], together: Sequence[KeyValues]) -> list[float]:
    """Mean cosine of keys and of values over the prefix's tokens, by layer, all heads as one vector.

    Keys carry RoPE. That is a rotation which depends on the position alone, so the cosine is that without it.

    Args:
        alone: of the prefix alone.
        together: of the whole sequence, whose first rows are the prefix.
    """
    return [
        sum(_cosine(one, two) for one, two in zip(mine, theirs, strict=True)) / 2
        for mine, theirs in zip(alone, together, strict=True)
    ]


def _cosine(alone: Tensor, together: Tensor) -> float:
    pair = alone.flatten(1), together[: len(alone)].flatten(1)
    return float(functional.cosine_similarity(*pair, dim=-1).mean())


def make_table(found: Iterable[tuple[int, Sequence[float]]], source: str, tau: float = TAU) -> DepthTable:
    """A table from mean similarities by share.

    Depths never fall as the share grows: a running maximum, as published.

    Args:
        found: share in percent, and the similarity of every layer.
        source: for the record.
        tau: similarity that counts as stable.
    """
    leading: dict[int, int] = {}
    best = layers = 0
    for percent, similarities in sorted(found):
        layers = len(similarities)
        count = next((layer for layer, value in enumerate(similarities) if value <= tau), layers)
        if count > best:
            leading[percent] = best = count
    return DepthTable(leading, layers, source)


def _parse(text: str) -> dict[int, int]:
    return {int(one): int(two) for one, two in (pair.split(":") for pair in text.split())}


PROFILED = "the official profiler at tau 0.97 and 500 samples a share, run by the authors of ACache (sands-lab/ACache)"
TABLES = {
    "LLaDA-8B-Instruct": DepthTable(
        _parse(
            "0:1 5:2 10:3 13:5 15:7 20:8 21:9 30:10 49:11 54:13 66:14 68:15 73:16 87:17 93:18 95:19 97:20 98:22 99:32"
        ),
        32,
        PROFILED,
    ),
    "Dream-v0-Instruct-7B": DepthTable(
        _parse("0:1 9:2 10:4 19:5 32:6 47:7 56:8 63:9 76:12 85:13 86:14 92:16 94:17 95:18 96:28"), 28, PROFILED
    ),
}
"""Of models that others have profiled."""
