"""The forward pass over rows of many requests at once.

A request brings the rows that are to be computed, and for the positions that are not, keys and values from before. As
attention has no direction and keys carry their positions (RoPE is applied before they are kept), keys may be in any
order. Linear layers see the rows of all requests together, attention those of one request or of those who share keys.

The rows of a shared prefix may join late: until layer b a request computes its own rows against the prefix's cached
keys and values, at layer b the prefix's state after layer b - 1 is put in front, and from then on its rows are computed
too (BiCache, arXiv 2606.07571). Nothing is computed that nobody reads: that state has cached keys and values of layer b
as well, and in its last layer a request computes queries for the rows that are wanted only.

Shape letters as in `weights.py`, and N rows, P prefix tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from forebay.diffusion.attention import Asked, Attention, KeyValues, attend, attend_varlen, has_flash
from forebay.diffusion.weights import LayerWeights, ModelWeights
from forebay.kernels.linear import linear
from forebay.kernels.rows import rms_norm, silu_and_mul


@dataclass(frozen=True, slots=True)
class Join:
    """The rows of a prefix that enter late."""

    layer: int
    """b, below the last layer of the request."""
    state_PD: Tensor
    """After layer b - 1; at b = 0 the embedding."""
    known: Sequence[KeyValues] = ()
    """Of the prefix, layers 0 to b; none where b is 0: then layer 0 computes them."""


@dataclass(frozen=True, slots=True)
class Kept:
    """Keys and values of all own positions from an earlier pass, of which this one renews some."""

    layers: Sequence[KeyValues]
    first: int
    """Place of the first row that is computed; the others follow it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """One request's part of a pass."""

    tokens_N: Tensor
    positions_N: Tensor
    prefix: Join | Sequence[KeyValues] = ()
    """Rows that join, or keys and values by layer; none where there is no prefix."""
    kept: Kept | None = None
    wanted: Tensor | None = None
    """Places among the rows whose last state is read; all of them where it is None."""
    last: int | None = None
    """Its last layer; that of the model where it is None."""
    keep: bool = False
    """Whether its own keys and values are wanted."""


@dataclass(slots=True)
class Computed:
    """What a pass leaves behind of one request."""

    hidden_ND: Tensor
    """Of the rows that were wanted, after its last layer, before the model's last norm."""
    own: list[KeyValues] = field(default_factory=list)
    """Of its own rows, by layer, where they were to be kept."""
    prefix: list[KeyValues] = field(default_factory=list)
    """Of the prefix that joined, by layer, the cached ones too."""
    prefix_state_PD: Tensor | None = None
    """Of the prefix that joined, before its last layer."""


@dataclass(slots=True)
class _Part:
    """A request within a pass: which of its rows are there at the moment."""

    rows: Rows
    computed: Computed
    last: int
    prefix: int = 0
    own: int = 0

    @classmethod
    def begin(cls, rows: Rows, last: int, nothing_ND: Tensor) -> _Part:
        known = rows.prefix.known if isinstance(rows.prefix, Join) else ()
        computed = Computed(nothing_ND, prefix=list(known))
        return cls(rows, computed, last if rows.last is None else rows.last, own=len(rows.tokens_N))

    @property
    def join(self) -> Join | None:
        return self.rows.prefix if isinstance(self.rows.prefix, Join) else None

    @property
    def count(self) -> int:
        return self.prefix + self.own

    def positions(self) -> Tensor:
        """Of the rows that are there."""
        own = self.rows.positions_N
        if not self.own:
            own = own[:0]
        return torch.cat([torch.arange(self.prefix, device=own.device), own]) if self.prefix else own

    def asking(self, layer: int) -> Tensor | None:
        """Places of the rows whose queries are needed in a layer; None where all are."""
        if layer != self.last:
            return None
        wanted = self.rows.wanted
        if wanted is None:
            wanted = torch.arange(self.own, device=self.rows.tokens_N.device)
        return wanted + self.prefix

    def asked(self, layer: int) -> Tensor | None:
        """Places of the rows whose keys and values are needed in a layer; None where all are."""
        if self.join is None or self.join.layer != layer or not self.join.known:
            return None
        return torch.arange(self.prefix, self.count, device=self.rows.tokens_N.device)

    def segments(self, layer: int, found: KeyValues) -> list[KeyValues]:
        """All that the request attends to in a layer, of which `found` has just been computed.

        What is kept is copied, because `found` is part of a tensor of all requests.
        """
        new = len(found.keys) - self.own
        own = KeyValues(found.keys[new:], found.values[new:])
        if self.rows.keep:
            self.computed.own.append(own.copy())
        if new:
            self.computed.prefix.append(KeyValues(found.keys[:new], found.values[:new]).copy())
        if self.rows.kept is not None:
            own = _renew(self.rows.kept, layer, own)
        elif new:
            return [found]
        before = self.computed.prefix if self.join is not None else self.rows.prefix
        assert not isinstance(before, Join)
        return [before[layer], own] if before else [own]


def _renew(kept: Kept, layer: int, own: KeyValues) -> KeyValues:
    """All own positions, with the new ones in their places."""
    everything = kept.layers[layer]
    for old, new in zip(everything, own, strict=True):
        old[kept.first : kept.first + len(new)] = new
    return everything


class Transformer:
    """A model that runs passes.

    Args:
        weights: all of one type on one device.
        reduce: sums a tensor over the processes that each hold a part of every layer (tensor parallelism), in place;
            None where this process holds all.
        attention: how rows attend; by what suits the device and the type where it is None.
    """

    def __init__(
        self,
        weights: ModelWeights,
        reduce: Callable[[Tensor], Tensor] | None = None,
        attention: Attention | None = None,
    ) -> None:
        self.weights = weights
        self.config = weights.config
        flash = has_flash(weights.norm_D.device, weights.norm_D.dtype)
        self.attention = attention or (attend_varlen if flash else attend)
        self._reduce = reduce
        size, positions, device = self.config.head_size, self.config.positions, weights.norm_D.device
        self._heads = weights.layers[0].attention_output.shape[1] // size
        self._kv_heads = (weights.layers[0].qkv.shape[0] // size - self._heads) // 2
        frequency = self.config.rope_theta ** (-torch.arange(0, size, 2, device=device).double() / size)
        angle = torch.outer(torch.arange(positions, device=device).double(), frequency)
        self._turns = torch.polar(torch.ones_like(angle), angle).to(torch.complex64)
        """Of every position, (T, S / 2)."""

    def embed(self, tokens_N: Tensor) -> Tensor:
        """(N, D)."""
        return self.weights.embedding_VD[tokens_N]

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """(N, V): to be asked for the rows that are needed only."""
        with torch.no_grad():
            return linear(self._norm(hidden_ND, self.weights.norm_D), self.weights.output_VD)

    def average(self, values: Sequence[float]) -> list[float]:
        """The same numbers in all processes of a tensor-parallel group: the mean of theirs."""
        if self._reduce is None:
            return list(values)
        size = self.config.heads // self._heads
        found: list[float] = (self._reduce(torch.tensor(values, device=self._turns.device)) / size).tolist()
        return found

    def run(self, batch: Sequence[Rows]) -> list[Computed]:
        """All layers, for all requests of a batch."""
        with torch.no_grad():
            return self._run(batch)

    def _run(self, batch: Sequence[Rows]) -> list[Computed]:
        last = len(self.weights.layers) - 1
        x_ND = torch.cat([self.embed(rows.tokens_N) for rows in batch])
        parts = [_Part.begin(rows, last, x_ND[:0]) for rows in batch]
        rotation = self._rotation(parts)
        for number, layer in enumerate(self.weights.layers):
            joined = self._join(number, x_ND, parts)
            if joined is not None:
                x_ND, rotation = joined, self._rotation(parts)
            if not len(x_ND):
                continue
            x_ND = self._layer(layer, number, x_ND, parts, rotation)
            if any(part.last == number for part in parts):
                x_ND = _leave(number, x_ND, parts)
                rotation = self._rotation(parts)
        return [part.computed for part in parts]

    def _join(self, number: int, x_ND: Tensor, parts: Sequence[_Part]) -> Tensor | None:
        """The rows with those of the prefixes that join at a layer; None where none does."""
        if not any(part.join is not None and part.join.layer == number for part in parts):
            return None
        pieces = []
        for part, own in zip(parts, x_ND.split([part.count for part in parts]), strict=True):
            if part.join is not None and part.join.layer == number:
                part.prefix = len(part.join.state_PD)
                pieces.append(part.join.state_PD)
            pieces.append(own)
        return torch.cat(pieces)

    def _layer(
        self, layer: LayerWeights, number: int, x_ND: Tensor, parts: Sequence[_Part], rotation: Tensor
    ) -> Tensor:
        """One layer of all rows; in the last layer of a request, of those that are wanted."""
        if any(part.last == number and part.prefix for part in parts):
            _keep_states(number, x_ND, parts)
        asking, counts = _choose(parts, [part.asking(number) for part in parts], x_ND.device)
        asked, key_counts = _choose(parts, [part.asked(number) for part in parts], x_ND.device)
        queries, keys, values = self._project(layer, self._norm(x_ND, layer.attention_norm_D), asking, asked, rotation)
        found = [KeyValues(*pair) for pair in zip(keys.split(key_counts), values.split(key_counts), strict=True)]
        attended = self.attention(
            [
                Asked(mine, part.segments(number, pair))
                for mine, part, pair in zip(queries.split(counts), parts, found, strict=True)
                if part.count
            ]
        )
        x_ND = x_ND if asking is None else x_ND[asking]
        x_ND = x_ND + self._sum(linear(torch.cat(attended).flatten(1), layer.attention_output))
        hidden = silu_and_mul(linear(self._norm(x_ND, layer.mlp_norm_D), layer.gate_up))
        return x_ND + self._sum(linear(hidden, layer.down_DI))

    def _project(
        self,
        layer: LayerWeights,
        normed_ND: Tensor,
        asking: Tensor | None,
        asked: Tensor | None,
        rotation: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of some rows, and keys and values of others, all of them with RoPE where it belongs."""
        size, heads, kv_heads = self.config.head_size, self._heads, self._kv_heads
        if asking is None and asked is None:
            both = linear(normed_ND, layer.qkv, layer.qkv_bias).view(len(normed_ND), -1, size)
            turned = self._rotate(both[:, : heads + kv_heads], rotation)
            return turned[:, :heads], turned[:, heads:], both[:, heads + kv_heads :]
        cut = heads * size
        bias = (None, None) if layer.qkv_bias is None else (layer.qkv_bias[:cut], layer.qkv_bias[cut:])
        mine, theirs = (normed_ND if one is None else normed_ND[one] for one in (asking, asked))
        queries = linear(mine, layer.qkv[:cut], bias[0]).view(len(mine), heads, size)
        pairs = linear(theirs, layer.qkv[cut:], bias[1]).view(len(theirs), 2 * kv_heads, size)
        turned, rotated = (
            self._rotate(one, rotation if places is None else rotation[places])
            for one, places in ((queries, asking), (pairs[:, :kv_heads], asked))
        )
        return turned, rotated, pairs[:, kv_heads:]

    def _rotation(self, parts: Sequence[_Part]) -> Tensor:
        """RoPE of the rows that are there, (N, 1, S / 2)."""
        return self._turns[torch.cat([part.positions() for part in parts])][:, None]

    def _rotate(self, x: Tensor, rotation: Tensor) -> Tensor:
        """In float32, as RoPE loses in bfloat16 what far positions differ by."""
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * rotation).flatten(2).to(x.dtype)

    def _norm(self, x_ND: Tensor, weight_D: Tensor) -> Tensor:
        return rms_norm(x_ND, weight_D, self.config.norm_epsilon)

    def _sum(self, x_ND: Tensor) -> Tensor:
        return x_ND if self._reduce is None else self._reduce(x_ND)


def _choose(
    parts: Sequence[_Part], places: Sequence[Tensor | None], device: torch.device
) -> tuple[Tensor | None, list[int]]:
    """Places of all requests as places among all rows, None where these are all rows; and how many each has."""
    if all(one is None for one in places):
        return None, [part.count for part in parts]
    first, found = 0, []
    for part, one in zip(parts, places, strict=True):
        found.append(first + (torch.arange(part.count, device=device) if one is None else one))
        first += part.count
    return torch.cat(found), [len(one) for one in found]


def _keep_states(number: int, x_ND: Tensor, parts: Sequence[_Part]) -> None:
    """Of prefixes before the last layer of their request."""
    for part, rows in zip(parts, x_ND.split([part.count for part in parts]), strict=True):
        if part.last == number and part.prefix:
            part.computed.prefix_state_PD = rows[: part.prefix].clone()


def _leave(number: int, x_ND: Tensor, parts: Sequence[_Part]) -> Tensor:
    """The rows of the requests that have layers left."""
    counts = []
    for part in parts:
        places = part.asking(number)
        counts.append(part.count if places is None else len(places))
    pieces = []
    for part, piece in zip(parts, x_ND.split(counts), strict=True):
        if part.last == number:
            part.computed.hidden_ND = piece
            part.prefix = part.own = 0
        else:
            pieces.append(piece)
    return torch.cat(pieces) if pieces else x_ND[:0]
