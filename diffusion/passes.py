"""The passes of one request: which rows each of them computes, and what is remembered for the next ones.

Two kinds of reuse come together:

* of the shared prefix (BiCache, arXiv 2606.07571). A *refresh* takes the prefix's own keys and values in the first b
  layers and computes its rows anew, with those of the request, from layer b on; it always starts from the prefix alone,
  never from the last refresh. Other passes use what the last refresh left;
* within the request (Fast-dLLM, arXiv 2505.22618). The first pass of a block computes all of the request's rows; the
  others of that block only the block's and, with the `prefix` cache, those behind it. With the `dual` cache, keys and
  values from the first pass stand in for the rows on both sides.

Shape letters: N rows of the request behind its prefix, P prefix tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from forebay.diffusion.attention import KeyValues
from forebay.diffusion.depth import similarity
from forebay.diffusion.prefix import PrefixStates, reuses_all
from forebay.diffusion.transformer import Computed, Join, Kept, Rows, Transformer

BlockCache = Literal["none", "prefix", "dual"]
BLOCK_CACHES: tuple[BlockCache, ...] = ("none", "prefix", "dual")
STRETCH = 4
"""How much longer or shorter than asked for an interval that follows the drift may become; our choice."""


class Span(NamedTuple):
    """Places from one up to another among the rows of a request."""

    first: int
    last: int


@dataclass(slots=True)
class PassCounts:
    """What has happened to a request."""

    passes: int = 0
    refreshes: int = 0


@dataclass(slots=True)
class Passes:
    """The passes of a request.

    Args:
        transformer: the model.
        states: of its prefix, deep enough.
        depth: b, how many layers reuse them.
        refresh: T, passes from one refresh to the next; 0 refreshes when a block begins, as Fast-dLLM does.
        block_cache: which rows are computed between the first passes of blocks.
        tau: similarity that counts as stable.
        adaptive: whether the interval follows the drift from refresh to refresh.
        audit: whether to begin with a pass that finds out whether b is safe for this request.
    """

    transformer: Transformer
    states: PrefixStates
    depth: int
    refresh: int
    block_cache: BlockCache
    tau: float
    adaptive: bool = False
    audit: bool = False
    lowered: bool = False
    """Whether the audit has just lowered b."""
    counts: PassCounts = field(default_factory=PassCounts)
    _interval: float = field(init=False)
    _age: int | None = None
    """Passes since the last refresh; None before the first."""
    _prefix: Sequence[KeyValues] = ()
    """Keys and values that the last refresh left of the prefix."""
    _own: list[KeyValues] = field(default_factory=list)
    """Of all own rows, from the first pass of the block."""

    def __post_init__(self) -> None:
        self._interval = self.refresh

    def rows(self, tokens_N: Tensor, block: Span, wanted_N: Tensor, begins: bool) -> Rows:
        """What the next pass computes.

        Args:
            tokens_N: all of the request.
            block: the current block, with the row before where the logits are shifted.
            wanted_N: places whose last state is read.
            begins: whether this is the block's first pass.
        """
        if self.audit:
            return self._audit(tokens_N)
        prefix = self.states.join(self.transformer, self.depth) if self._refreshes(begins) else self._prefix
        span = self._span(len(tokens_N), block, begins)
        return Rows(
            tokens_N=tokens_N[span.first : span.last],
            positions_N=self._positions(tokens_N, span),
            prefix=prefix,
            kept=None if span == (0, len(tokens_N)) else Kept(self._own, span.first),
            wanted=wanted_N - span.first,
            keep=begins and self.block_cache != "none",
        )

    def take(self, computed: Computed, begins: bool) -> bool:
        """Remember what a pass left; whether it computed what was wanted."""
        if self.audit:
            self._judge(computed)
            return False
        self.counts.passes += 1
        if self._refreshes(begins):
            self._follow(computed.prefix)
            self._prefix, self._age = computed.prefix or self.states.known, 0
            self.counts.refreshes += 1
        if computed.own:
            self._own = computed.own
        assert self._age is not None
        self._age += 1
        return True

    def weight(self, rows: int, block: Span, begins: bool) -> int:
        """Rows that the next pass computes, those of the prefix by the share of the layers that they are in."""
        span = self._span(rows, block, begins)
        layers, prefix = self.transformer.config.layers, len(self.states.tokens_P)
        if self.audit:
            return (rows + prefix) * (self.depth + 1) // layers
        joins = self._refreshes(begins) and not reuses_all(self.depth, layers)
        return span.last - span.first + (prefix * (layers - self.depth) // layers if joins else 0)

    def _refreshes(self, begins: bool) -> bool:
        if self._age is None:
            return True
        return self._age >= max(1, int(self._interval)) if self.refresh else begins

    def _span(self, rows: int, block: Span, begins: bool) -> Span:
        """The rows that are computed."""
        if begins or self.audit or self.block_cache == "none":
            return Span(0, rows)
        return block if self.block_cache == "dual" else Span(block.first, rows)

    def _positions(self, tokens_N: Tensor, span: Span) -> Tensor:
        before = len(self.states.tokens_P)
        return torch.arange(before + span.first, before + span.last, device=tokens_N.device)

    def _audit(self, tokens_N: Tensor) -> Rows:
        """All rows, as deep as the prefix is reused: what its keys and values truly are."""
        join = self.states.join(self.transformer, 0)
        assert isinstance(join, Join)
        return Rows(
            tokens_N=tokens_N,
            positions_N=self._positions(tokens_N, Span(0, len(tokens_N))),
            prefix=join,
            wanted=tokens_N.new_empty(0),
            last=min(self.depth, self.transformer.config.layers - 1),
        )

    def _judge(self, computed: Computed) -> None:
        """Lower b where this request shows that it is not safe."""
        self.audit = False
        found = self._similarity(self.states.known[: len(computed.prefix)], computed.prefix)
        safe = safe_depth(found, self.tau)
        if safe < self.depth:
            self.states.limit = self.depth = safe
            self.lowered = True
            self.states.deepen(self.transformer, safe)

    def _follow(self, prefix: Sequence[KeyValues]) -> None:
        """Make the interval such that the prefix drifts by 1 - tau from one refresh to the next; our rule.

        The drift is taken from the deep layers, where the prefix sees the request, as the mean over them.
        """
        deep = slice(self.depth + 1, None)
        if not self.adaptive or not self.refresh or not self._prefix or not prefix[deep]:
            return
        found = self._similarity(self._prefix[deep], prefix[deep])
        drift = max(1 - sum(found) / len(found), 1e-6)
        longest, shortest = self.refresh * STRETCH, self.refresh / STRETCH
        self._interval = min(longest, max(shortest, self._interval * (1 - self.tau) / drift))

    def _similarity(self, one: Sequence[KeyValues], two: Sequence[KeyValues]) -> list[float]:
        return self.transformer.average(similarity(one, two))


def safe_depth(similarities: Sequence[float], tau: float) -> int:
    """b that one request shows to be safe, by the rule `boundary`.

    Args:
        similarities: of all layers whose keys and values it reuses, 0 to b.
        tau: similarity that counts as stable.
    """
    leading = next((layer for layer, value in enumerate(similarities) if value <= tau), len(similarities))
    return leading if leading == len(similarities) else max(1, leading - 1)
