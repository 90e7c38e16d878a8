"""States of prefixes that requests share, in bounded memory.

A prefix is known by all of its tokens: the states of a shorter one are not the beginning of a longer one's, because
attention within a prefix goes both ways. Everything else that they depend on (the model's weights, its type, the depths
that states are kept for) is fixed for one cache.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from forebay.diffusion.prefix import PrefixStates
from forebay.diffusion.transformer import Transformer


@dataclass(slots=True)
class CacheStatistics:
    """Counts since the cache was made."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0


@dataclass(slots=True)
class _Entry:
    states: PrefixStates
    users: int = 0


class PrefixCache:
    """Computes states once and keeps the most recently used.

    Args:
        transformer: the model.
        depths: every b that a request may have.
        capacity: bytes of states to keep. What requests use stays, so it may be exceeded for as long as they run.
    """

    def __init__(self, transformer: Transformer, depths: Collection[int], capacity: int) -> None:
        self.transformer = transformer
        self.depths = frozenset(depths)
        self.capacity = capacity
        self.bytes = 0
        self.statistics = CacheStatistics()
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, tokens_P: Tensor) -> bool:
        return prefix_key(tokens_P) in self._entries

    def acquire(self, tokens_P: Tensor) -> PrefixStates:
        """The states of a prefix, which stay until they are released as often as they were acquired."""
        key = prefix_key(tokens_P)
        entry = self._entries.get(key)
        if entry is None:
            self.statistics.misses += 1
            entry = _Entry(PrefixStates.compute(self.transformer, tokens_P, self.depths))
            self._entries[key] = entry
            self.bytes += entry.states.bytes
        else:
            self.statistics.hits += 1
            self._entries.move_to_end(key)
        entry.users += 1
        self._shrink()
        return entry.states

    def release(self, states: PrefixStates) -> None:
        """A request needs them no more."""
        self._entries[prefix_key(states.tokens_P)].users -= 1
        self._shrink()

    def _shrink(self) -> None:
        """Let go what nobody uses, the longest unused first, until the rest fits."""
        for key in list(self._entries):
            if self.bytes <= self.capacity:
                return
            entry = self._entries[key]
            if not entry.users:
                del self._entries[key]
                self.bytes -= entry.states.bytes
                self.statistics.evictions += 1


def prefix_key(tokens_P: Tensor) -> bytes:
    """A digest of all tokens."""
    return hashlib.blake2b(tokens_P.to("cpu", torch.int64).numpy().tobytes(), digest_size=16).digest()
