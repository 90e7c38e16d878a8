"""The backbone in int8, with a scale for each row of its matrices (ours, beyond the paper).

Residuals are taken from what the int8 values stand for, so units that experts keep come out as they were, and only
those that fall back to the backbone are rounded. Shape letters as in `experts.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from forebay.compression.experts import Expert

LARGEST = 127
"""So that values are symmetric; -128 is not used."""
SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class Int8Backbone:
    """A backbone as it is stored: each row is its int8 values times its scale."""

    weights: Expert
    """int8."""
    gate_scale_H: Tensor
    """float32, above 0, as the others."""
    up_scale_H: Tensor
    down_scale_D: Tensor

    @property
    def scales(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of gate, up and down."""
        return self.gate_scale_H, self.up_scale_H, self.down_scale_D

    def dequantized(self) -> Expert:
        """What the values stand for, float32."""
        parts = self.weights.gate_HD, self.weights.up_HD, self.weights.down_DH
        return Expert(*(part.float() * scale[:, None] for part, scale in zip(parts, self.scales, strict=True)))


def quantize(weights: Expert) -> Int8Backbone:
    """Round every matrix row by row to the nearest of 255 steps, the largest of which is the row's largest weight."""
    parts = [_quantize_rows(part) for part in (weights.gate_HD, weights.up_HD, weights.down_DH)]
    return Int8Backbone(Expert(*(values for values, _ in parts)), *(scale for _, scale in parts))


def backbone_bytes(units: int, size: int) -> int:
    """Of a stored backbone with so many hidden units and model dimensions, scales included."""
    return 3 * units * size + SCALE_BYTES * (2 * units + size)


def _quantize_rows(matrix: Tensor) -> tuple[Tensor, Tensor]:
    wide = matrix.float()
    scale = wide.abs().amax(1) / LARGEST
    scale = torch.where(scale == 0, 1.0, scale)  # a row of zeros
    return (wide / scale[:, None]).round().clamp(-LARGEST, LARGEST).to(torch.int8), scale
