"""The CPU kernels of every instruction set that this processor has, against the reference."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from forebay.kernels.parser_moe import cpu
from forebay.kernels.parser_moe.reference import forward as reference
from tests.kernels.parser_layers import Inputs, random_inputs, relative_error

TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""float32: its rounding; else that of one output value, computed in float32 and rounded once."""


@pytest.fixture
def threads() -> Iterator[None]:
    """Restores the number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def error(inputs: Inputs, activation: str = "silu", variant: str = cpu.VARIANTS[0]) -> float:
    y_TD = cpu.forward(*inputs, activation, variant=variant)
    assert y_TD.dtype == inputs.x_TD.dtype
    return relative_error(y_TD, reference(*inputs, activation))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("variant", cpu.VARIANTS)
@pytest.mark.parametrize("top_k", range(1, 9))
@pytest.mark.parametrize("tokens", [1, 7, 129])
def test_equals_reference(tokens: int, top_k: int, variant: str, dtype: torch.dtype) -> None:
    inputs = random_inputs(tokens, top_k, dtype=dtype, shift=top_k)
    assert error(inputs, variant=variant) < TOLERANCE[dtype]


@pytest.mark.parametrize("variant", cpu.VARIANTS)
@pytest.mark.parametrize("tokens", [2, 3, 4, 5, 8, 16, 17])
def test_whole_and_part_groups_of_tokens(tokens: int, variant: str) -> None:
    assert error(random_inputs(tokens, 3), variant=variant) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("variant", cpu.VARIANTS)
@pytest.mark.parametrize(("hidden", "dim"), [(2, 3), (3, 5), (16, 32), (31, 33), (257, 1025), (300, 2048), (1027, 96)])
def test_odd_sizes(hidden: int, dim: int, variant: str, dtype: torch.dtype) -> None:
    for tokens in (2, 40):
        inputs = random_inputs(tokens, 3, hidden=hidden, dim=dim, dtype=dtype)
        assert error(inputs, variant=variant) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("variant", cpu.VARIANTS)
@pytest.mark.parametrize(("hidden", "dim"), [(2, 3), (3, 5), (45, 77), (64, 128), (257, 1025), (300, 2048)])
def test_int8_backbone(hidden: int, dim: int, variant: str, dtype: torch.dtype) -> None:
    for tokens in (1, 2, 7, 50, 129):
        inputs = random_inputs(tokens, 3, hidden=hidden, dim=dim, dtype=dtype, int8=True)
        assert error(inputs, variant=variant) < TOLERANCE[dtype]


@pytest.mark.parametrize("activation", cpu.ACTIVATIONS)
@pytest.mark.parametrize("variant", cpu.VARIANTS)
def test_activations_over_their_whole_range(variant: str, activation: str) -> None:
    inputs = random_inputs(64, 2)
    far = inputs._replace(x_TD=inputs.x_TD * torch.logspace(-4, 3, 64)[:, None])
    assert error(far, activation, variant) < TOLERANCE[torch.float32]


def test_subnormal_halves() -> None:
    inputs = random_inputs(3, 2, dtype=torch.float16)
    weights = replace(
        inputs.weights, down_DH=inputs.weights.down_DH * 1e-6, residual_down_RD=inputs.weights.residual_down_RD * 1e-6
    )
    wide = inputs._replace(weights=weights, x_TD=inputs.x_TD.float())
    assert 0 < weights.down_DH.abs().max() < 6.1e-5
    assert relative_error(1e6 * cpu.forward(*wide, "silu"), 1e6 * reference(*wide, "silu")) < 3e-6


def test_input_of_another_type_than_the_weights() -> None:
    inputs = random_inputs(5, 2, dtype=torch.bfloat16)
    assert error(inputs._replace(x_TD=inputs.x_TD.float(), ids_TK=inputs.ids_TK.long())) < 3e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("variant", cpu.VARIANTS)
@pytest.mark.parametrize("scale", [1e-9, 1e-6, 1.0, 1e5, 1e38])
def test_output_is_rounded_as_torch_does(scale: float, variant: str, dtype: torch.dtype) -> None:
    inputs = random_inputs(33, 3, dim=301)
    narrow = inputs.x_TD.to(dtype)
    narrow[5, 7], narrow[6, 8] = torch.nan, torch.inf
    weights = replace(
        inputs.weights, down_DH=inputs.weights.down_DH * scale, residual_down_RD=inputs.weights.residual_down_RD * scale
    )
    wide_TD = cpu.forward(*inputs._replace(x_TD=narrow.float(), weights=weights), "silu", variant=variant)
    found_TD = cpu.forward(*inputs._replace(x_TD=narrow, weights=weights), "silu", variant=variant)
    torch.testing.assert_close(found_TD, wide_TD.to(dtype), rtol=0, atol=0, equal_nan=True)


def test_calls_at_the_same_time() -> None:
    inputs = [random_inputs(tokens, 2) for tokens in (1, 300, 40, 2100)]
    expected = [cpu.forward(*one, "silu") for one in inputs]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda turn: cpu.forward(*inputs[turn % 4], "silu"), range(40)))
    assert all(torch.equal(y_TD, expected[turn % 4]) for turn, y_TD in enumerate(found))


def test_no_pair_is_ours() -> None:
    inputs = random_inputs(4, 2)
    for skipped in (-1, 9, 1 << 30):
        y_TD = cpu.forward(*inputs._replace(ids_TK=torch.full_like(inputs.ids_TK, skipped)), "silu")
        assert torch.equal(y_TD, torch.zeros_like(y_TD))


def test_no_token() -> None:
    assert cpu.forward(*random_inputs(0, 2), "silu").shape == (0, 77)


def test_an_expert_named_twice_by_one_token() -> None:
    inputs = random_inputs(9, 4)
    assert error(inputs._replace(ids_TK=torch.full_like(inputs.ids_TK, 2))) < 3e-6


def test_more_tokens_than_one_tile() -> None:
    assert error(random_inputs(2500, 2)) < 3e-6


def test_strided_tokens() -> None:
    inputs = random_inputs(6, 2)
    strided = inputs._replace(x_TD=inputs.x_TD.T.contiguous().T, w_TK=inputs.w_TK.T.contiguous().T)
    assert not strided.x_TD.is_contiguous()
    assert torch.equal(cpu.forward(*strided, "silu"), cpu.forward(*inputs, "silu"))


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("tokens", [1, 8, 129])
def test_result_does_not_depend_on_the_number_of_threads(tokens: int, int8: bool, threads: None) -> None:
    inputs = random_inputs(tokens, 4, hidden=300, dim=500, int8=int8)
    found: list[Tensor] = []
    for count in (1, 2, 3, 8):
        torch.set_num_threads(count)
        found.append(cpu.forward(*inputs, "silu"))
    assert all(torch.equal(y_TD, found[0]) for y_TD in found)


@pytest.mark.parametrize("int8", [False, True])
def test_result_does_not_depend_on_the_batch(int8: bool) -> None:
    inputs = random_inputs(60, 4, hidden=300, dim=1500, dtype=torch.bfloat16, int8=int8)
    together = cpu.forward(*inputs, "silu")
    alone = [cpu.forward(*(part[t : t + 1] for part in inputs[:3]), inputs.weights, "silu") for t in range(60)]
    assert torch.equal(torch.cat(alone), together)


def test_weights_that_the_kernels_cannot_read() -> None:
    inputs = random_inputs(3, 2)
    weights = inputs.weights
    for wrong, words in (
        ({"down_DH": weights.down_DH.T.contiguous().T}, "down_DH .* strides"),
        ({"up_HD": weights.up_HD[:-1]}, "up_HD .*shape"),
        ({"residual_up_RD": weights.residual_up_RD.half()}, "residual_up_RD is torch.float16"),
        ({"indices_R": weights.indices_R.long()}, "indices_R is torch.int64"),
        ({"gate_HD": weights.gate_HD.double()}, "gate_HD is torch.float64"),
        ({"residual_gate_RD": weights.residual_gate_RD.double()}, "float64; the CPU kernels read"),
        ({"gate_HD": weights.gate_HD.to(torch.int8)}, "torch.int8 with 0 scales; int8 has 3"),
        ({"gate_scale_H": torch.ones(45)}, "torch.float32 with 1 scales; int8 has 3, other types none"),
        ({"offsets_E1": weights.offsets_E1.flip(0)}, "offsets"),
        ({"indices_R": weights.indices_R.flip(0)}, "ascend"),
        ({"indices_R": weights.indices_R + 1}, "backbone"),
        ({"indices_R": weights.indices_R - 1}, "backbone"),
    ):
        with pytest.raises(ValueError, match=words):
            cpu.forward(*inputs._replace(weights=replace(weights, **wrong)), "silu")


def test_int8_that_the_kernels_cannot_read() -> None:
    inputs = random_inputs(3, 2, int8=True)
    weights = inputs.weights
    assert weights.down_scale_D is not None
    for wrong, words in (
        ({"up_scale_H": None}, "torch.int8 with 2 scales; int8 has 3"),
        ({"up_HD": weights.up_HD.float()}, "up_HD is torch.float32"),
        ({"residual_up_RD": weights.residual_up_RD.to(torch.int8)}, "residual_up_RD is torch.int8"),
        ({"down_scale_D": weights.down_scale_D[:-1]}, r"down_scale_D is .*shape \(76,\).*shape \(77,\)"),
        ({"down_scale_D": weights.down_scale_D.bfloat16()}, "down_scale_D is torch.bfloat16"),
    ):
        with pytest.raises(ValueError, match=words):
            cpu.forward(*inputs._replace(weights=replace(weights, **wrong)), "silu")


def test_inputs_that_the_kernels_cannot_read() -> None:
    inputs = random_inputs(3, 2)
    for wrong, activation, words in (
        ({"w_TK": inputs.w_TK[:2]}, "silu", "router weights"),
        ({"ids_TK": inputs.ids_TK[:, :1]}, "silu", "router weights"),
        ({"x_TD": inputs.x_TD[:, 1:]}, "silu", "gate_HD"),
        ({}, "relu", "relu"),
    ):
        with pytest.raises(ValueError, match=words):
            cpu.forward(*inputs._replace(**wrong), activation)


def test_an_instruction_set_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match="variant mmx"):
        cpu.forward(*random_inputs(1, 1), "silu", variant="mmx")
