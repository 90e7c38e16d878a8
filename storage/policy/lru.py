"""Least recently used first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import ClassVar

from forebay.storage.policy.base import Policy


class LRU(Policy):
    """One list, coldest first."""

    name: ClassVar[str] = "lru"

    def __init__(self) -> None:
        self._order: OrderedDict[bytes, None] = OrderedDict()

    def insert(self, names: Sequence[bytes]) -> None:
        """At the recent end."""
        self._order.update(dict.fromkeys(reversed(names)))

    def touch(self, names: Sequence[bytes]) -> None:
        """To the recent end."""
        order = self._order
        for name in reversed(names):
            if name in order:
                order.move_to_end(name)

    def remove(self, name: bytes) -> None:
        """Out of the list."""
        self._order.pop(name, None)

    def pop(self, evictable: Callable[[bytes], bool]) -> bytes | None:
        """The least recently used one that may go."""
        for name in self._order:
            if evictable(name):
                del self._order[name]
                return name
        return None

    def __len__(self) -> int:
        return len(self._order)
