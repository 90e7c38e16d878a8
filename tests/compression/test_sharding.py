"""A layer shared out to ranks computes what it computed whole."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from forebay.compression.experts import Expert
from forebay.compression.int8 import quantize
from forebay.compression.sharding import EngineError, check_ranks, deal_units, shard
from forebay.kernels.parser_moe.reference import forward
from forebay.kernels.parser_moe.weights import ParserWeights

E, H, D, T, K = 6, 24, 10, 17, 3


def layer(kept: list[int], seed: int = 0) -> ParserWeights:
    random = torch.Generator().manual_seed(seed)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    indices = [torch.randperm(H, generator=random)[:count].sort().values for count in kept]
    rows = sum(kept)
    return ParserWeights(
        values(H, D), values(H, D), values(D, H), values(rows, D), values(rows, D), values(rows, D),
        torch.cat(indices).int(), torch.tensor([0, *kept]).cumsum(0).int(),
    )  # fmt: skip


def in_int8(layer: ParserWeights) -> ParserWeights:
    stored = quantize(Expert(layer.gate_HD, layer.up_HD, layer.down_DH))
    gate_scale, up_scale, down_scale = stored.scales
    return replace(
        layer, gate_HD=stored.weights.gate_HD, up_HD=stored.weights.up_HD, down_DH=stored.weights.down_DH,
        gate_scale_H=gate_scale, up_scale_H=up_scale, down_scale_D=down_scale,
    )  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("kept", [[4, 0, 24, 1, 7, 2], [0] * E, [H] * E])
def test_ranks_add_up_to_the_layer(kept: list[int], int8: bool, ranks: int) -> None:
    whole = in_int8(layer(kept)) if int8 else layer(kept)
    x, weights = torch.randn(T, D, dtype=torch.float64), torch.rand(T, K, dtype=torch.float64)
    experts = torch.stack([torch.randperm(E)[:K] for _ in range(T)]).int()
    parts = [shard(whole, rank, ranks) for rank in range(ranks)]
    summed = sum(forward(x, weights, experts, part, "silu") for part in parts)
    torch.testing.assert_close(summed, forward(x, weights, experts, whole, "silu"))
    for part in parts:
        assert part.gate_HD.shape == (H // ranks, D)
        for expert in range(E):
            mine = part.indices_R[part.offsets_E1[expert] : part.offsets_E1[expert + 1]]
            assert (mine.diff() > 0).all()


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_kept_units_are_balanced(ranks: int) -> None:
    """Though some units are kept by most experts and most by none."""
    indices = (torch.rand(6000, generator=torch.Generator().manual_seed(ranks)) ** 3 * 1408).int()
    dealt = deal_units(indices, 1408, ranks)
    assert torch.equal(torch.cat(dealt).sort().values, torch.arange(1408))
    counts = torch.bincount(indices.long(), minlength=1408)
    shares = [int(counts[units].sum()) for units in dealt]
    assert max(shares) - min(shares) <= 1
    assert {len(units) for units in dealt} == {1408 // ranks}


def test_uneven_shares_are_refused() -> None:
    with pytest.raises(EngineError, match=r"size 5 does not divide the 1408 .* near it that do: 1, 2, 4, 8$"):
        check_ranks(1408, 5)
