"""The routed experts of one MoE layer.

Shape letters: E experts, H hidden units of an expert, D model dimension, N calibration rows.
A *unit* is one hidden dimension of an expert: a row of gate, a row of up, a column of down.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Expert:
    """Weights of one expert, or of the backbone, as Hugging Face stores them."""

    gate_HD: Tensor
    up_HD: Tensor
    down_DH: Tensor

    def permuted(self, order_H: Tensor) -> Self:
        """The same function with its units in another order."""
        return type(self)(self.gate_HD[order_H], self.up_HD[order_H], self.down_DH.index_select(1, order_H))

    def cloud(self) -> Tensor:
        """Units as points (H, 3D), float32: gate row, up row, down column."""
        return torch.cat([self.gate_HD.float(), self.up_HD.float(), self.down_DH.float().T], dim=1)

    def to(self, dtype: torch.dtype, *, copy: bool = False) -> Self:
        """In another type; sharing memory if it is the same, unless told to copy."""
        return type(self)(*(part.to(dtype, copy=copy) for part in (self.gate_HD, self.up_HD, self.down_DH)))

    def add_(self, other: Expert) -> None:
        """Add to this one in place, in its own type."""
        self.gate_HD.add_(other.gate_HD)
        self.up_HD.add_(other.up_HD)
        self.down_DH.add_(other.down_DH)

    def divide_(self, number: int) -> None:
        """Divide in place."""
        for part in (self.gate_HD, self.up_HD, self.down_DH):
            part.div_(number)

    def __sub__(self, other: Expert) -> Self:
        return type(self)(self.gate_HD - other.gate_HD, self.up_HD - other.up_HD, self.down_DH - other.down_DH)

    def __add__(self, other: Expert) -> Self:
        return type(self)(self.gate_HD + other.gate_HD, self.up_HD + other.up_HD, self.down_DH + other.down_DH)

    @classmethod
    def from_cloud(cls, cloud_H3D: Tensor) -> Self:
        """The inverse of `cloud`."""
        gate, up, down = cloud_H3D.tensor_split(3, dim=1)
        return cls(gate.contiguous(), up.contiguous(), down.T.contiguous())
