"""What is known of a prefix before any request that starts with it.

A request that reuses it in b layers needs its keys and values in layers 0 to b, and its state before layer b, from
where its rows are computed together with those of the request (BiCache, arXiv 2606.07571). The published cache keeps
keys, values and outputs of all layers; here only those are computed and kept that some request has asked for. A larger
b continues from the state of the next smaller one.

Shape letters: P prefix tokens, D model dimension.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from forebay.diffusion.attention import KeyValues
from forebay.diffusion.transformer import Join, Rows, Transformer


@dataclass(slots=True)
class PrefixStates:
    """Keys, values and states of a prefix that is alone."""

    tokens_P: Tensor
    known: list[KeyValues] = field(default_factory=list)
    """By layer, as deep as any request has asked for."""
    states: dict[int, Tensor] = field(default_factory=dict)
    """By b: the state before layer b, (P, D)."""
    limit: int | None = None
    """The largest b that has been found safe for this very prefix, where that is less than its model's table says."""
    key: bytes = b""
    """What a cache knows it by."""

    def holds(self, depth: int, layers: int) -> bool:
        """Whether a request may reuse `depth` of so many layers right now."""
        return len(self.known) == layers if reuses_all(depth, layers) else depth in self.states

    def deepen(self, transformer: Transformer, depth: int) -> None:
        """Compute what a request needs that reuses `depth` layers, and is not there."""
        layers = transformer.config.layers
        if not depth or self.holds(depth, layers):
            return
        everything = reuses_all(depth, layers)
        (made,) = transformer.run([self._alone(transformer, layers - 1 if everything else depth)])
        self.known += made.prefix[len(self.known) :]
        if not everything:
            assert made.prefix_state_PD is not None
            self.states[depth] = made.prefix_state_PD

    def join(self, transformer: Transformer, depth: int) -> Join | list[KeyValues]:
        """The prefix in a refresh of a request that reuses it in `depth` layers; 0 computes all of it."""
        if reuses_all(depth, transformer.config.layers):
            return self.known
        if not depth:
            return Join(0, transformer.embed(self.tokens_P))
        return Join(depth, self.states[depth], self.known[: depth + 1])

    @property
    def bytes(self) -> int:
        """Memory that it takes."""
        tensors = [tensor for pair in self.known for tensor in pair] + list(self.states.values())
        return sum(tensor.nbytes for tensor in tensors)

    def _alone(self, transformer: Transformer, last: int) -> Rows:
        """The prefix's rows from the deepest state below on."""
        below = max((depth for depth in self.states if depth < last), default=0)
        nothing = torch.empty(0, dtype=torch.long, device=self.tokens_P.device)
        return Rows(tokens_N=nothing, positions_N=nothing, prefix=self.join(transformer, below), last=last)


def reuses_all(depth: int, layers: int) -> bool:
    """Whether no row of the prefix is ever computed.

    With b = L - 1 as with b = L: the keys and values of the last layer are cached, and its outputs are not needed.
    """
    return depth >= layers - 1
