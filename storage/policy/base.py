"""The eviction contract: names come in, the coldest one comes out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar


class Policy(ABC):
    """An order over names.

    A chunk is useful only as long as all chunks before it in its prompt are there, so whenever several are named
    together, in prefix order, the last one is the first to go.
    """

    name: ClassVar[str]

    @abstractmethod
    def insert(self, names: Sequence[bytes]) -> None:
        """Add new names, in prefix order, as the most recent ones."""

    @abstractmethod
    def touch(self, names: Sequence[bytes]) -> None:
        """Note a use of names, in prefix order; unknown ones are ignored."""

    @abstractmethod
    def remove(self, name: bytes) -> None:
        """Forget a name (it was dropped, not evicted); an unknown one is ignored."""

    @abstractmethod
    def pop(self, evictable: Callable[[bytes], bool]) -> bytes | None:
        """Take out the coldest name for which `evictable` holds; None when there is none."""

    @abstractmethod
    def __len__(self) -> int:
        """Names held."""
