"""What a generation costs by counting operations: linear layers, attention and the output layer.

Of a request with P prefix rows and S others, b layers of which reuse the prefix. A multiplication with an addition
counts as two operations; norms, rotations and softmax as none.
"""

from __future__ import annotations

from dataclasses import dataclass

from forebay.diffusion.config import DiffusionConfig


@dataclass(frozen=True, slots=True)
class Cost:
    """Operations of single passes of a model."""

    config: DiffusionConfig
    prefix: int
    rest: int
    block: int

    def full(self) -> float:
        """Every row in every layer."""
        return self.refresh(0)

    def refresh(self, depth: int) -> float:
        """The rest in every layer, the prefix's rows from layer b on."""
        deep = self.config.layers - depth
        return self._rows(self.rest, self.config.layers) + self._rows(self.prefix, deep) + self._head()

    def step(self) -> float:
        """The rest alone."""
        return self._rows(self.rest, self.config.layers) + self._head()

    def block_step(self) -> float:
        """One block alone."""
        return self._rows(self.block, self.config.layers) + self._head()

    def _rows(self, rows: int, layers: int) -> float:
        config = self.config
        width = config.heads * config.head_size
        linear = 2 * width + 2 * config.kv_heads * config.head_size + 3 * config.intermediate
        attention = 2 * width * (self.prefix + self.rest)
        return 2.0 * rows * layers * (linear * config.hidden + attention)

    def _head(self) -> float:
        """On average half of a block's rows are still masked."""
        return 2.0 * self.config.hidden * self.config.vocabulary * self.block / 2
