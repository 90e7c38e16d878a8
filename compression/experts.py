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
        return type(self)(self.gate_HD[order_H], self.up_HD[order_H], self.down_DH[:, order_H])

    def cloud(self) -> Tensor:
        """Units as points (H, 3D), float32: gate row, up row, down column."""
        return torch.cat([self.gate_HD.float(), self.up_HD.float(), self.down_DH.float().T], dim=1)

    def to(self, dtype: torch.dtype) -> Self:
        """In another type."""
        return type(self)(self.gate_HD.to(dtype), self.up_HD.to(dtype), self.down_DH.to(dtype))

    def __sub__(self, other: Expert) -> Self:
        return type(self)(self.gate_HD - other.gate_HD, self.up_HD - other.up_HD, self.down_DH - other.down_DH)

    def __add__(self, other: Expert) -> Self:
        return type(self)(self.gate_HD + other.gate_HD, self.up_HD + other.up_HD, self.down_DH + other.down_DH)

    @classmethod
    def from_cloud(cls, cloud_H3D: Tensor) -> Self:
        """The inverse of `cloud`."""
        gate, up, down = cloud_H3D.tensor_split(3, dim=1)
        return cls(gate.contiguous(), up.contiguous(), down.T.contiguous())
