"""States of prefixes that requests share, in bounded memory, and behind it a store that outlives the process.

A prefix is known by all of its tokens: the states of a shorter one are not the beginning of a longer one's, because
attention within a prefix goes both ways. Everything else that they depend on (the model's weights and their type) is
fixed for one cache, and has to be for one store.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from forebay.diffusion.prefix import PrefixStates
from forebay.diffusion.transformer import Transformer


class StateStore(Protocol):
    """Where states go that are to be found again after a restart, or when memory is short.

    A store may lose anything at any time, but never returns what is not what was put there, and raises nothing.
    """

    def get(self, key: bytes, tokens_P: Tensor) -> PrefixStates | None:
        """The states of a prefix, as deep as it has them, for the caller alone."""

    def put(self, key: bytes, states: PrefixStates) -> None:
        """Keep states, or more of them than before, in the background; what it has already costs next to nothing."""

    @property
    def bytes(self) -> int:
        """How much it holds."""


@dataclass(slots=True)
class CacheStatistics:
    """Counts since the cache was made."""

    hits: int = 0
    misses: int = 0
    restored: int = 0
    """Hits that the store answered."""
    evictions: int = 0


@dataclass(slots=True)
class _Entry:
    states: PrefixStates
    bytes: int = 0
    users: int = 0
    requests: int = 0
    """That have ever used it."""


class PrefixCache:
    """Computes states once and keeps the most recently used.

    Args:
        transformer: the model.
        capacity: bytes of states to keep. What requests use stays, so it may be exceeded for as long as they run.
        store: where states are found again; None keeps them in memory only.
    """

    def __init__(self, transformer: Transformer, capacity: int, store: StateStore | None = None) -> None:
        self.transformer = transformer
        self.capacity = capacity
        self.store = store
        self.bytes = 0
        self.statistics = CacheStatistics()
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, tokens_P: Tensor) -> bool:
        return prefix_key(tokens_P) in self._entries

    def acquire(self, tokens_P: Tensor, depth: int) -> PrefixStates:
        """The states of a prefix, which stay until they are released as often as they were acquired.

        Args:
            tokens_P: the whole prefix.
            depth: b; where the prefix has a lower limit of its own, states are there for that.
        """
        key = prefix_key(tokens_P)
        entry = self._find(key, tokens_P)
        entry.users += 1
        entry.requests += 1
        self._deepen(key, entry, depth)
        self._shrink()
        return entry.states

    def release(self, states: PrefixStates) -> None:
        """A request needs them no more."""
        self._entries[states.key].users -= 1
        self._shrink()

    def requests(self, states: PrefixStates) -> int:
        """How many requests have ever used them."""
        return self._entries[states.key].requests

    def grown(self, states: PrefixStates) -> None:
        """They are deeper than before, or have another limit."""
        self._account(states.key, self._entries[states.key])

    def clear(self) -> None:
        """Forget all that is not in use; the store keeps its own."""
        for key in [key for key, entry in self._entries.items() if not entry.users]:
            self.bytes -= self._entries.pop(key).bytes

    def _find(self, key: bytes, tokens_P: Tensor) -> _Entry:
        entry = self._entries.get(key)
        if entry is not None:
            self.statistics.hits += 1
            self._entries.move_to_end(key)
            return entry
        states = self._restore(key, tokens_P)
        if states is None:
            self.statistics.misses += 1
        else:
            self.statistics.hits += 1
            self.statistics.restored += 1
        entry = self._entries[key] = _Entry(states or PrefixStates(tokens_P.to(self.transformer.weights.norm_D.device)))
        entry.states.key = key
        entry.bytes = entry.states.bytes
        self.bytes += entry.bytes
        return entry

    def _restore(self, key: bytes, tokens_P: Tensor) -> PrefixStates | None:
        """What the store has.

        Where it has not the same in all processes of a tensor-parallel group, nothing: they compute what is missing
        together.
        """
        if self.store is None:
            return None
        found = self.store.get(key, tokens_P)
        mine = _outline(found, self.transformer.config.layers)
        same = float(self.transformer.average(mine) == mine)
        return found if self.transformer.average([same]) == [1.0] else None

    def _deepen(self, key: bytes, entry: _Entry, depth: int) -> None:
        states = entry.states
        depth = depth if states.limit is None else min(depth, states.limit)
        if not states.holds(depth, self.transformer.config.layers):
            states.deepen(self.transformer, depth)
            self._account(key, entry)

    def _account(self, key: bytes, entry: _Entry) -> None:
        before, entry.bytes = entry.bytes, entry.states.bytes
        self.bytes += entry.bytes - before
        if self.store:
            self.store.put(key, entry.states)

    def _shrink(self) -> None:
        """Let go what nobody uses, the longest unused first, until the rest fits.

        The store has had it since it was computed. It is told again, as it may have lost it since, or not had room.
        """
        for key in list(self._entries):
            if self.bytes <= self.capacity:
                return
            entry = self._entries[key]
            if not entry.users:
                del self._entries[key]
                self.bytes -= entry.bytes
                self.statistics.evictions += 1
                if self.store:
                    self.store.put(key, entry.states)


def _outline(states: PrefixStates | None, layers: int) -> list[float]:
    """Numbers that say how deep states are, and nothing else."""
    if states is None:
        return [-1.0] * (layers + 2)
    limit = -1 if states.limit is None else states.limit
    return [float(len(states.known)), float(limit), *(float(depth in states.states) for depth in range(layers))]


def prefix_key(tokens_P: Tensor) -> bytes:
    """A digest of all tokens."""
    return hashlib.blake2b(tokens_P.to("cpu", torch.int64).numpy().tobytes(), digest_size=16).digest()
