"""What is known of a prefix before any request that starts with it, and the passes of such a request.

A *refresh* takes the prefix's own keys and values in the first b layers and computes its rows anew, with the request's,
from layer b on. Until the next refresh the request's rows alone are computed, against the keys and values that the
refresh left (BiCache, arXiv 2606.07571). b = 0 is a refresh within the request only; b = L never looks at the prefix
again.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor

from forebay.diffusion.transformer import Computed, Join, KeyValues, Rows, Transformer


@dataclass(frozen=True, slots=True)
class PrefixStates:
    """Keys, values and states of a prefix that is alone, as deep as any request may use them."""

    tokens_P: Tensor
    known: list[KeyValues]
    """Layers 0 to the deepest b, less one."""
    states: dict[int, Tensor]
    """By b: the state before layer b, (P, D)."""

    @classmethod
    def compute(cls, transformer: Transformer, tokens_P: Tensor, depths: Collection[int]) -> PrefixStates:
        """One pass over the prefix alone.

        Args:
            transformer: the model.
            tokens_P: the whole prefix.
            depths: every b that a request may have; 0 needs nothing of this.
        """
        layers = transformer.config.layers
        rows = Rows(tokens_P, _count(tokens_P, 0), states=frozenset(depths) - {layers})
        (made,) = transformer.run([rows])
        return cls(tokens_P, made.own[: max(depths)], made.states)

    @property
    def bytes(self) -> int:
        """Memory that it takes."""
        tensors = [tensor for pair in self.known for tensor in pair] + list(self.states.values())
        return sum(tensor.nbytes for tensor in tensors)


@dataclass(slots=True)
class PrefixedRequest:
    """The passes of one request behind a prefix.

    Args:
        transformer: the model.
        states: of the prefix.
        depth: b, one that `states` was computed for, or 0.
    """

    transformer: Transformer
    states: PrefixStates
    depth: int
    _kept: list[KeyValues] = field(default_factory=list)

    def refresh(self, tokens_N: Tensor) -> Rows:
        """The rows of a refresh; `keep` wants what comes of them."""
        return Rows(tokens_N, self._positions(tokens_N), join=self._join())

    def keep(self, computed: Computed) -> None:
        """Remember what a refresh left of the prefix."""
        self._kept = computed.prefix

    def step(self, tokens_N: Tensor) -> Rows:
        """The rows of any other step."""
        return Rows(tokens_N, self._positions(tokens_N), known=self._kept)

    def _join(self) -> Join:
        states, depth = self.states, self.depth
        if depth == self.transformer.config.layers:
            return Join(depth, torch.empty(0), states.known)
        state = states.states[depth] if depth else self.transformer.embed(states.tokens_P)
        return Join(depth, state, states.known[:depth])

    def _positions(self, tokens_N: Tensor) -> Tensor:
        return _count(tokens_N, len(self.states.tokens_P))


def _count(tokens_N: Tensor, first: int) -> Tensor:
    return torch.arange(first, first + len(tokens_N), device=tokens_N.device)
