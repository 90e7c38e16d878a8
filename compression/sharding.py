"""Sharing one compressed layer out to ranks that compute in parallel (tensor parallelism).

Every rank gets an equal share of the hidden units: their rows of the backbone's gate and up, their columns of its down,
and what the experts keep in them. Scales of an int8 backbone go with its rows; all ranks have those of down. The sum of
the ranks' outputs is the layer's output.

Shape letters: E experts, H hidden units, R kept units of all experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forebay.compression.errors import CompressionError
from forebay.kernels.parser_moe.weights import ParserWeights


class EngineError(CompressionError):
    """A compressed model cannot be served with these settings of the engine."""


def check_ranks(hidden_units: int, ranks: int) -> None:
    """Raise when the hidden units cannot be shared out evenly.

    Raises:
        EngineError: naming sizes that would do.
    """
    if hidden_units % ranks:
        fitting = ", ".join(str(size) for size in range(1, 2 * ranks) if hidden_units % size == 0)
        raise EngineError(
            f"tensor parallel size {ranks} does not divide the {hidden_units} hidden units of the backbone; "
            f"sizes near it that do: {fitting}"
        )


def deal_units(indices_R: Tensor, hidden_units: int, ranks: int) -> list[Tensor]:
    """The hidden units of every rank, ascending, (H / ranks,) int64 each.

    The order of units is free, so each in turn, the most often kept first, goes to the rank that has the fewest kept
    units so far: all ranks compute about the same (our choice; a contiguous split would follow the accidents of order).
    """
    check_ranks(hidden_units, ranks)
    counts = torch.bincount(indices_R.long(), minlength=hidden_units)
    kept, dealt = [0] * ranks, [list[int]() for _ in range(ranks)]
    for unit in counts.argsort(descending=True, stable=True).tolist():
        hungry = [rank for rank in range(ranks) if len(dealt[rank]) < hidden_units // ranks]
        rank = min(hungry, key=kept.__getitem__)
        dealt[rank].append(unit)
        kept[rank] += int(counts[unit])
    return [torch.tensor(sorted(units)) for units in dealt]


def shard(weights: ParserWeights, rank: int, ranks: int) -> ParserWeights:
    """One rank's part of a layer; every rank deals alike and so needs no other's answer."""
    if ranks == 1:
        return weights
    hidden_units = weights.gate_HD.shape[0]
    units = deal_units(weights.indices_R, hidden_units, ranks)[rank]
    slot_of_H = torch.full((hidden_units,), -1)
    slot_of_H[units] = torch.arange(len(units))
    slots_R = slot_of_H[weights.indices_R.long()]
    mine_R = slots_R >= 0
    before = torch.cat([torch.zeros(1, dtype=torch.int64), mine_R.cumsum(0)])
    return ParserWeights(
        gate_HD=weights.gate_HD[units],
        up_HD=weights.up_HD[units],
        down_DH=weights.down_DH[:, units],
        residual_gate_RD=weights.residual_gate_RD[mine_R],
        residual_up_RD=weights.residual_up_RD[mine_R],
        residual_down_RD=weights.residual_down_RD[mine_R],
        indices_R=slots_R[mine_R].int(),
        offsets_E1=before[weights.offsets_E1.long()].int(),
        gate_scale_H=None if weights.gate_scale_H is None else weights.gate_scale_H[units],
        up_scale_H=None if weights.up_scale_H is None else weights.up_scale_H[units],
        down_scale_D=weights.down_scale_D,
    )
