"""A fair sample of the rows that reach each expert, in bounded memory."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class Reservoir:
    """Keeps up to `capacity` rows, each row that was offered with the same probability (Vitter's algorithm R).

    Whole batches at a time; the published implementation draws row by row, with other random numbers.
    """

    def __init__(self, capacity: int, seed: int) -> None:
        self.capacity = capacity
        self.seen = 0
        self._random = np.random.default_rng(seed)
        self._rows: Tensor | None = None

    def offer(self, rows_ND: Tensor) -> None:
        """Take rows in."""
        count = len(rows_ND)
        if not count:
            return
        if self._rows is None:
            self._rows = torch.empty(self.capacity, rows_ND.shape[1], dtype=rows_ND.dtype)
        free = min(count, max(0, self.capacity - self.seen))
        self._rows[self.seen : self.seen + free] = rows_ND[:free].cpu()
        places = self._random.integers(0, np.arange(self.seen + free, self.seen + count) + 1)
        self.seen += count
        chosen = np.flatnonzero(places < self.capacity)
        last = dict(zip(places[chosen].tolist(), (free + chosen).tolist(), strict=True))  # the later row wins
        if last:
            self._rows[list(last)] = rows_ND[list(last.values())].cpu()

    def rows(self) -> Tensor:
        """What was kept: (N, D)."""
        if self._rows is None:
            return torch.empty(0, 0)
        return self._rows[: min(self.seen, self.capacity)]
