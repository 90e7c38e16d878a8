"""The weights of one compressed MoE layer, as every kernel takes them.

Shape letters: T tokens, K experts per token, E experts, H hidden units of the backbone, D model dimension, R kept units
of all experts together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class ParserWeights:
    """One shared backbone, and what each expert adds to it in the hidden units that it keeps.

    Expert e is the backbone with `residual_*[offsets[e]:offsets[e + 1]]` added at the hidden units
    `indices[offsets[e]:offsets[e + 1]]`: rows of gate and up, columns of down (PARSER, arXiv 2609.00575).
    """

    gate_HD: Tensor
    up_HD: Tensor
    down_DH: Tensor
    residual_gate_RD: Tensor
    residual_up_RD: Tensor
    residual_down_RD: Tensor
    """Row r is added to column `indices[r]` of down."""
    indices_R: Tensor
    """int32, ascending within an expert."""
    offsets_E1: Tensor
    """int32, E + 1 entries from 0 to R."""
    gate_scale_H: Tensor | None = None
    """float32, of a backbone in int8: what each row of gate is multiplied by. All three scales, or none."""
    up_scale_H: Tensor | None = None
    down_scale_D: Tensor | None = None

    @property
    def scales(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Of gate, up and down."""
        return self.gate_scale_H, self.up_scale_H, self.down_scale_D

    @property
    def experts(self) -> int:
        """E."""
        return int(self.offsets_E1.shape[0]) - 1
