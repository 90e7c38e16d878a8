"""The torch operator: registered once, right on the CPU, one node to torch.compile."""

from __future__ import annotations

import importlib
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from forebay.kernels.parser_moe import ops, reference
from tests.kernels.parser_layers import Inputs, random_inputs, relative_error

TOLERANCE = {torch.float32: 2e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def arguments(inputs: Inputs, activation: str = "silu") -> tuple[Any, ...]:
    tensors = [getattr(inputs.weights, field.name) for field in fields(inputs.weights)]
    return (*inputs[:3], *tensors[:8], activation, *tensors[8:])


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_operator_equals_the_reference(dtype: torch.dtype, activation: str, int8: bool):
    inputs = random_inputs(7, 4, dtype=dtype, int8=int8)
    y_TD = ops.parser_moe(*inputs, activation)
    assert y_TD.dtype == dtype
    assert relative_error(y_TD, reference.forward(*inputs, activation)) <= TOLERANCE[dtype]


def test_loading_the_module_again_keeps_the_operator():
    before = torch.ops.forebay.parser_moe.default
    importlib.reload(ops)
    assert torch.ops.forebay.parser_moe.default is before
    ops.parser_moe(*random_inputs(2, 2), "silu")


@pytest.mark.parametrize("int8", [False, True])
def test_torch_finds_no_fault_in_the_registration(int8: bool):
    torch.library.opcheck(torch.ops.forebay.parser_moe.default, arguments(random_inputs(7, 4, int8=int8)))


def test_scales_may_be_left_out():
    inputs = random_inputs(7, 4)
    assert torch.equal(torch.ops.forebay.parser_moe(*arguments(inputs)[:12]), ops.parser_moe(*inputs, "silu"))


def test_compiles_into_one_graph_for_any_number_of_tokens():
    weights = random_inputs(1, 1).weights
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    @torch.compile(fullgraph=True, dynamic=True, backend=backend)
    def layer(x, w, ids):
        return x + ops.parser_moe(x * 2, w, ids, weights, "gelu")

    for tokens in (2, 7, 30):
        x, w, ids, _ = random_inputs(tokens, 4)
        expected = x + reference.forward(x * 2, w, ids, weights, "gelu")
        assert relative_error(layer(x, w, ids), expected) < 1e-5
    assert len(graphs) == 1


def test_compiles_with_inductor():
    inputs = random_inputs(3, 2)
    compiled = torch.compile(lambda x: ops.parser_moe(x + 1, *inputs[1:], "silu") * 2, fullgraph=True)
    expected = reference.forward(inputs.x_TD + 1, *inputs[1:], "silu") * 2
    assert relative_error(compiled(inputs.x_TD), expected) < 1e-5


def test_result_is_described_without_being_computed():
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments(random_inputs(5, 2))]
        y_TD = torch.ops.forebay.parser_moe(*fake)
    assert y_TD.shape == (5, 77)
    assert y_TD.is_contiguous()


def test_what_a_kernel_cannot_take_is_refused_by_name():
    inputs = random_inputs(5, 2)
    with pytest.raises(ValueError, match="'relu' is not one of silu, gelu, gelu_tanh"):
        ops.check(inputs.x_TD, inputs.ids_TK, inputs.weights, "relu")
    with pytest.raises(ValueError, match=r"x is \(5, 76\).*gate \(45, 77\)"):
        ops.check(inputs.x_TD[:, 1:], inputs.ids_TK, inputs.weights, "silu")
    unscaled = replace(inputs.weights, gate_HD=inputs.weights.gate_HD.to(torch.int8))
    with pytest.raises(ValueError, match=r"a backbone of torch\.int8: int8 has three"):
        ops.check(inputs.x_TD, inputs.ids_TK, unscaled, "silu")
    with pytest.raises(ValueError, match=r"a backbone of torch\.float32: .*, other types none"):
        ops.check(inputs.x_TD, inputs.ids_TK, replace(inputs.weights, gate_scale_H=torch.ones(45)), "silu")
    transposed = replace(inputs.weights, residual_down_RD=inputs.weights.residual_down_RD.T.contiguous().T)
    with pytest.raises(ValueError, match="contiguous"):
        ops.check(inputs.x_TD, inputs.ids_TK, transposed, "silu")
