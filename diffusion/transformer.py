"""The forward pass over rows of many requests at once.

A request brings the rows that are to be computed, and for the positions that are not, keys and values from before. As
attention has no direction and keys carry their positions (RoPE is applied before they are kept), keys may be in any
order. Linear layers see the rows of all requests together, attention those of one request at a time.

The rows of a shared prefix may join late: until layer b a request computes its own rows against the prefix's cached
keys and values, at layer b the prefix's state after layer b - 1 is put in front, and from then on its rows are computed
too (BiCache, arXiv 2606.07571).

Shape letters as in `weights.py`, and N rows, P prefix tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from forebay.diffusion.weights import LayerWeights, ModelWeights


class KeyValues(NamedTuple):
    """Keys, with RoPE, and values of some positions in one layer: (N, K, S) each."""

    keys: Tensor
    values: Tensor

    def before(self, other: KeyValues) -> KeyValues:
        """These and then the others."""
        return KeyValues(torch.cat([self.keys, other.keys]), torch.cat([self.values, other.values]))


@dataclass(frozen=True, slots=True)
class Join:
    """The rows of a prefix that enter late."""

    layer: int
    """b, from 0 to L. At L they never do."""
    state_PD: Tensor
    """After layer b - 1; at b = 0 the embedding."""
    known: Sequence[KeyValues]
    """Of the prefix, layers 0 to b - 1."""


@dataclass(frozen=True, slots=True)
class Rows:
    """One request's part of a pass."""

    tokens_N: Tensor
    positions_N: Tensor
    known: Sequence[KeyValues] = ()
    """Of positions that are not computed, by layer; none where there are none. Beside the prefix that joins."""
    join: Join | None = None
    states: frozenset[int] = frozenset()
    """Layers before which the state of its own rows is to be kept."""


@dataclass(slots=True)
class Computed:
    """What a pass leaves behind of one request."""

    hidden_ND: Tensor
    """Of its own rows after the last layer, before the last norm."""
    own: list[KeyValues] = field(default_factory=list)
    """Of its own rows, by layer."""
    prefix: list[KeyValues] = field(default_factory=list)
    """Of the prefix that joined, by layer."""
    states: dict[int, Tensor] = field(default_factory=dict)
    """Of its own rows, before the layers that were asked for."""


class Transformer:
    """A model that runs passes.

    Args:
        weights: all of one type on one device.
    """

    def __init__(self, weights: ModelWeights) -> None:
        self.weights = weights
        self.config = weights.config
        size, positions = self.config.head_size, self.config.positions
        device = weights.norm_D.device
        frequency = self.config.rope_theta ** (-torch.arange(0, size, 2, device=device).double() / size)
        angle = torch.outer(torch.arange(positions, device=device).double(), frequency).repeat(1, 2)
        self._cos_TS, self._sin_TS = angle.cos().to(weights.norm_D.dtype), angle.sin().to(weights.norm_D.dtype)

    def embed(self, tokens_N: Tensor) -> Tensor:
        """(N, D)."""
        return self.weights.embedding_VD[tokens_N]

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """(N, V): to be asked for the rows that are needed only."""
        return functional.linear(self._norm(hidden_ND, self.weights.norm_D), self.weights.output_VD)

    def run(self, batch: Sequence[Rows]) -> list[Computed]:
        """All layers, for all requests of a batch."""
        with torch.no_grad():
            return self._run(batch)

    def _run(self, batch: Sequence[Rows]) -> list[Computed]:
        computed = [Computed(torch.empty(0)) for _ in batch]
        parts = [self.embed(rows.tokens_N) for rows in batch]
        x_ND = torch.cat(parts)
        counts = [len(part) for part in parts]
        for number, layer in enumerate(self.weights.layers):
            _keep_states(number, x_ND.split(counts), batch, computed)
            if any(rows.join is not None and rows.join.layer == number for rows in batch):
                joined = [_join(number, part, rows) for part, rows in zip(x_ND.split(counts), batch, strict=True)]
                counts, x_ND = [len(part) for part in joined], torch.cat(joined)
            x_ND = self._layer(layer, number, x_ND, counts, batch, computed)
        _keep_states(len(self.weights.layers), x_ND.split(counts), batch, computed)
        for one, rows, part in zip(computed, batch, x_ND.split(counts), strict=True):
            one.hidden_ND = _own(part, rows)
        return computed

    def _layer(
        self,
        layer: LayerWeights,
        number: int,
        x_ND: Tensor,
        counts: list[int],
        batch: Sequence[Rows],
        computed: list[Computed],
    ) -> Tensor:
        normed = self._norm(x_ND, layer.attention_norm_D)
        qkv = functional.linear(normed, layer.qkv, layer.qkv_bias).split(counts)
        attended = [self._attend(number, part, rows, one) for part, rows, one in zip(qkv, batch, computed, strict=True)]
        x_ND = x_ND + functional.linear(torch.cat(attended), layer.attention_output)
        gate, up = functional.linear(self._norm(x_ND, layer.mlp_norm_D), layer.gate_up).chunk(2, dim=-1)
        return x_ND + functional.linear(functional.silu(gate) * up, layer.down_DI)

    def _attend(self, number: int, qkv: Tensor, rows: Rows, computed: Computed) -> Tensor:
        """Attention of one request in one layer, (N, Q S)."""
        config = self.config
        queries, keys, values = qkv.view(len(qkv), -1, config.head_size).split(
            [config.heads, config.kv_heads, config.kv_heads], dim=1
        )
        own = len(rows.tokens_N)
        prefix = len(qkv) - own
        positions = rows.positions_N
        if prefix:
            positions = torch.cat([torch.arange(prefix, device=positions.device), positions])
        queries, keys = self._rotate(queries, positions), self._rotate(keys, positions)
        found = KeyValues(keys, values)
        computed.own.append(KeyValues(keys[prefix:], values[prefix:]))
        if prefix:
            computed.prefix.append(KeyValues(keys[:prefix], values[:prefix]))
        elif rows.join is not None:
            computed.prefix.append(rows.join.known[number])
            found = rows.join.known[number].before(found)
        if rows.known:
            found = rows.known[number].before(found)
        return self._attention(queries, found).reshape(len(qkv), -1)

    def _attention(self, queries: Tensor, found: KeyValues) -> Tensor:
        q, k, v = (one.transpose(0, 1)[None] for one in (queries, found.keys, found.values))
        grouped = self.config.heads != self.config.kv_heads
        result = functional.scaled_dot_product_attention(q, k, v, enable_gqa=grouped)
        return result[0].transpose(0, 1)

    def _rotate(self, x: Tensor, positions_N: Tensor) -> Tensor:
        cos, sin = self._cos_TS[positions_N][:, None], self._sin_TS[positions_N][:, None]
        left, right = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-right, left], dim=-1) * sin

    def _norm(self, x_ND: Tensor, weight_D: Tensor) -> Tensor:
        return functional.rms_norm(x_ND, (x_ND.shape[-1],), weight_D, self.config.norm_epsilon)


def _own(part: Tensor, rows: Rows) -> Tensor:
    """A request's rows without those of a prefix that joined."""
    return part[len(part) - len(rows.tokens_N) :]


def _join(number: int, part: Tensor, rows: Rows) -> Tensor:
    if rows.join is None or rows.join.layer != number:
        return part
    return torch.cat([rows.join.state_PD, part])


def _keep_states(number: int, parts: Sequence[Tensor], batch: Sequence[Rows], computed: Sequence[Computed]) -> None:
    for part, rows, one in zip(parts, batch, computed, strict=True):
        if number in rows.states:
            one.states[number] = _own(part, rows)
