"""The same answer of a store on all ranks.

Ranks run the same passes together. A prefix that one of them finds in its part of the pool and another does not would
part them, so they ask each other, and what not all have alike, none has.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from forebay.diffusion.cache import StateStore
from forebay.diffusion.prefix import PrefixStates


class AgreedStates:
    """A `StateStore` on each rank's own.

    Args:
        store: this rank's.
        group: of the ranks' processes, for talk between CPUs.
    """

    def __init__(self, store: StateStore, group: Any) -> None:
        self._store = store
        self._group = group

    def get(self, key: bytes, tokens_P: Tensor) -> PrefixStates | None:
        """The states of a prefix, where all ranks have the same of them."""
        found = self._store.get(key, tokens_P)
        mine = None if found is None else (len(found.known), sorted(found.states), found.limit)
        theirs: list[Any] = [None] * torch.distributed.get_world_size(self._group)
        torch.distributed.all_gather_object(theirs, mine, group=self._group)
        return found if all(one == mine for one in theirs) else None

    def put(self, key: bytes, states: PrefixStates) -> None:
        """Keep this rank's share."""
        self._store.put(key, states)

    @property
    def bytes(self) -> int:
        """That this rank's store holds."""
        return self._store.bytes
