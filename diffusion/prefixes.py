"""Which leading tokens of a prompt are a prefix that other requests share, found without being told.

The states of a prefix serve requests with exactly that prefix, so what matters is that requests agree on where it
ends. Ends are found in this order:

1. a request says it;
2. the end of the system turn, where the model's chat template marks it (`markers.py`);
3. the longest prefix that was seen before. Prompts of one application that happen to go on alike for some tokens
   must not make a prefix of their own, nor every turn of a conversation. So ends are rounded down to the end of a turn
   where these are marked, and a shorter prefix, a known one first, gives way to a longer one only if that is much
   longer, or somewhat longer and many prompts part just there.

All of it is our choice: the published engine is told the prefix.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from forebay.diffusion.markers import Markers, Tokens

Ends = NDArray[np.int64]
"""Numbers of leading tokens."""
LEAST = 64
"""Tokens that are worth keeping states for."""
SOMEWHAT, MUCH = 16, 4
"""A prefix is somewhat longer by a 16th (and 16 tokens), much longer by a quarter (and `LEAST`)."""
MANY, ENOUGH = 16, 3
"""Many: a 16th of the prompts with the shorter prefix, and at least 3."""


class PrefixFinder:
    """Remembers prompts and the prefixes that were found in them.

    Args:
        markers: of the model's chats.
        shifted: whether the model's logits are shifted: then the last token of a prompt is never part of a prefix.
        least: tokens of a prefix that is found.
        prompts: recent prompts, and prefixes, to remember of each.
        limit: bytes that each of both may take, 4 a token.
    """

    def __init__(
        self,
        markers: Markers | None = None,
        *,
        shifted: bool = False,
        least: int = LEAST,
        prompts: int = 256,
        limit: int = 32 << 20,
    ) -> None:
        self.markers = markers or Markers()
        self.shifted = shifted
        self.least = least
        self._recent = _Remembered(prompts, limit)
        self._known = _Remembered(prompts, limit)

    def find(self, prompt: Sequence[int] | Tokens, given: int | None = None) -> int:
        """How many leading tokens are a shared prefix; 0 where none is. The prompt is remembered.

        Args:
            prompt: all of its tokens.
            given: what the request says.
        """
        tokens_N = np.ascontiguousarray(prompt, dtype=np.int32)
        longest = max(0, len(tokens_N) - self.shifted)
        key = tokens_N.tobytes()
        found = self._find(tokens_N, key, longest) if given is None else min(given, longest)
        self._recent.add(key)
        if found:
            self._known.renew(key[: 4 * found])
        return found

    @property
    def known(self) -> list[Tokens]:
        """The prefixes that are remembered, the longest unused first."""
        return [np.frombuffer(key, np.int32) for key in self._known.order]

    def _find(self, tokens_N: Tokens, key: bytes, longest: int) -> int:
        seen = self._seen(tokens_N, key, longest)
        system = min(self.markers.system_end(tokens_N), longest)
        best = system if system >= self.least else 0
        for end in (*self._matching(key, longest), *np.unique(seen).tolist()):
            if end > best and (not best or self._gives_way(best, end, seen)):
                best = end
        return best

    def _seen(self, tokens_N: Tokens, key: bytes, longest: int) -> Ends:
        """Where recent prompts part from this one, if late enough; ascending."""
        shared = np.sort(self._recent.shared(key))
        ends = np.minimum(shared[shared >= self.least], longest)
        if len(ends) and len(self.markers.turn):
            turns = np.concatenate([[0], self.markers.boundaries(tokens_N)])
            rounded = turns[np.searchsorted(turns, ends, side="right") - 1]
            ends = np.where(ends - rounded <= np.maximum(self.least, ends // MUCH), rounded, ends)
        return ends[ends >= self.least]

    def _matching(self, key: bytes, longest: int) -> list[int]:
        """Ends of the known prefixes that it begins with, ascending."""
        shared = self._known.shared(key)
        return [int(end) for end in shared[shared == self._known.lengths()] if self.least <= end <= longest]

    def _gives_way(self, shorter: int, longer: int, seen: Ends) -> bool:
        """Whether a request with both prefixes takes the longer one."""
        gain = longer - shorter
        if gain >= max(self.least, shorter // MUCH):
            return True
        if gain < max(SOMEWHAT, shorter // SOMEWHAT):
            return False
        parting, candidates = int(np.count_nonzero(seen == longer)), int(np.count_nonzero(seen >= shorter))
        return parting >= max(ENOUGH, candidates / MANY)


class _Remembered:
    """Sequences of tokens in bounded memory, of which all that begin like another one are found at once.

    They are held in alphabetical order, each with how many tokens it shares with the one before. What another
    sequence shares with any of them is then a running minimum, to both sides of its place.
    """

    def __init__(self, count: int, limit: int) -> None:
        self.order: deque[bytes] = deque()
        """From the oldest to the newest."""
        self.bytes = 0
        self._count, self._limit = count, limit
        self._keys: list[bytes] = []
        self._shared: list[int] = []

    def add(self, key: bytes) -> None:
        """As the newest; the oldest ones make room."""
        if len(key) > self._limit:
            return
        self.order.append(key)
        self._insert(key)
        while len(self.order) > self._count or self.bytes > self._limit:
            self._remove(self.order.popleft())

    def renew(self, key: bytes) -> None:
        """Make it the newest, once."""
        place = bisect_left(self._keys, key)
        if place < len(self._keys) and self._keys[place] == key:
            self.order.remove(key)
            self.order.append(key)
        else:
            self.add(key)

    def shared(self, key: bytes) -> Ends:
        """How many tokens each has in common with another sequence at the beginning, in alphabetical order."""
        place = bisect_left(self._keys, key)
        left = [_common(one, key) for one in self._keys[max(0, place - 1) : place]]
        right = [_common(one, key) for one in self._keys[place : place + 1]]
        before = np.minimum.accumulate(np.array([*left, *self._shared[1:place][::-1]], np.int64))[::-1]
        after = np.minimum.accumulate(np.array([*right, *self._shared[place + 1 :]], np.int64))
        return np.concatenate([before, after])

    def lengths(self) -> Ends:
        """Of all, in tokens, in alphabetical order."""
        return np.array([len(key) // 4 for key in self._keys], np.int64)

    def _insert(self, key: bytes) -> None:
        place = bisect_left(self._keys, key)
        self._keys.insert(place, key)
        self._shared.insert(place, _common(self._keys[place - 1], key) if place else 0)
        if place + 1 < len(self._keys):
            self._shared[place + 1] = _common(key, self._keys[place + 1])
        self.bytes += len(key)

    def _remove(self, key: bytes) -> None:
        place = bisect_left(self._keys, key)
        del self._keys[place]
        shared = self._shared.pop(place)
        if place < len(self._keys):
            self._shared[place] = min(shared, self._shared[place])
        self.bytes -= len(key)


def _common(one: bytes, two: bytes) -> int:
    """Tokens that both begin with."""
    size = min(len(one), len(two)) // 4
    differ = np.frombuffer(one, np.int32, size) != np.frombuffer(two, np.int32, size)
    place = int(differ.argmax()) if size else 0
    return place if size and differ[place] else size
