"""S3-FIFO (Yang et al., SOSP 2023): a small queue on probation, a main queue, and a memory of what left early.

What is seen once passes through the small queue and out; what is used again while there, or comes back soon
after, goes to the main queue. So one long prompt that never returns cannot flush the system prompts that do.

The paper never moves a name within its queue. Here a use moves it to the young end (our choice): only so does the
tail of a prompt leave before its head, and a lone owner thread has no lock to save by not moving it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import ClassVar

from forebay.storage.policy.base import Policy

SMALL_SHARE = 0.1
"""Of all names, how many the small queue holds before it is evicted from first (the paper's value)."""
MAX_USES = 3
"""Uses are counted up to here (the paper's 2 bits)."""
PROMOTE_AFTER = 1
"""A name leaves the small queue for the main one when used more often than this (the paper's value)."""


class S3FIFO(Policy):
    """Two queues of name -> uses, oldest first, and ghosts: names that left the small queue lately."""

    name: ClassVar[str] = "s3fifo"

    def __init__(self) -> None:
        self._small: OrderedDict[bytes, int] = OrderedDict()
        self._main: OrderedDict[bytes, int] = OrderedDict()
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()

    def insert(self, names: Sequence[bytes]) -> None:
        """On probation, or straight to the main queue when it left only lately."""
        for name in reversed(names):
            returning = name in self._ghosts
            self._ghosts.pop(name, None)
            (self._main if returning else self._small)[name] = 0

    def touch(self, names: Sequence[bytes]) -> None:
        """Count a use and move to the young end of its queue."""
        for name in reversed(names):
            queue = self._small if name in self._small else self._main
            if name in queue:
                queue[name] = min(queue[name] + 1, MAX_USES)
                queue.move_to_end(name)

    def remove(self, name: bytes) -> None:
        """Out of its queue."""
        self._small.pop(name, None)
        self._main.pop(name, None)

    def pop(self, evictable: Callable[[bytes], bool]) -> bytes | None:
        """From the small queue while it has more than its share, else from the main queue."""
        small_first = len(self._small) >= SMALL_SHARE * len(self)
        takes = (self._pop_small, self._pop_main) if small_first else (self._pop_main, self._pop_small)
        for take in takes:
            name = take(evictable)
            if name is not None:
                return name
        return None

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def _pop_small(self, evictable: Callable[[bytes], bool]) -> bytes | None:
        """The oldest on probation; those that were used enough move to the main queue instead."""
        promoted, victim = [], None
        for name, uses in self._small.items():
            if uses > PROMOTE_AFTER:
                promoted.append(name)
            elif evictable(name):
                victim = name
                break
        for name in promoted:
            del self._small[name]
            self._main[name] = 0
        if victim is not None:
            del self._small[victim]
            self._remember(victim)
        return victim

    def _pop_main(self, evictable: Callable[[bytes], bool]) -> bytes | None:
        """The oldest that was not used since its last turn."""
        stuck: set[bytes] = set()
        while len(stuck) < len(self._main):
            name = next(iter(self._main))
            uses = self._main[name]
            if uses == 0 and evictable(name):
                del self._main[name]
                return name
            if uses == 0:
                stuck.add(name)
            self._main[name] = max(uses - 1, 0)
            self._main.move_to_end(name)
        return None

    def _remember(self, name: bytes) -> None:
        self._ghosts[name] = None
        while len(self._ghosts) > max(len(self._main), 1):
            self._ghosts.popitem(last=False)
