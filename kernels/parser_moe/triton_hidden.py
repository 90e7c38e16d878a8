"""Hidden values of the kept units: h_PW[t K + k, i] for kept unit i of expert topk_ids[t, k].

h = act(g + x residual_gate^T) * (u + x residual_up^T), with g and u the backbone's. Shape letters as in `triton_math`.
Each variant walks the kept units in strides of the grid, whose size is set by the mean number kept: the host never
learns how many units an expert keeps.
"""

from __future__ import annotations

import triton
import triton.language as tl

from forebay.kernels.parser_moe.triton_group import locate
from forebay.kernels.parser_moe.triton_math import activate, kept_range, load_columns


@triton.jit  # type: ignore[untyped-decorator]
def hidden_few(
    x_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    g_ptr: tl.tensor,
    u_ptr: tl.tensor,
    residual_gate_ptr: tl.tensor,
    residual_up_ptr: tl.tensor,
    indices_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    h_ptr: tl.tensor,
    E: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """For few tokens: program (pair, stride) takes BLOCK_R units at a time, as dot products with one row of x."""
    pair = tl.program_id(0).to(tl.int64)
    token = pair // K
    first, count = kept_range(offsets_ptr, tl.load(ids_ptr + pair), E)
    for start in range(tl.program_id(1) * BLOCK_R, count, tl.num_programs(1) * BLOCK_R):
        units = start + tl.arange(0, BLOCK_R)
        # Lanes past the end read a valid row of the expert, and what they give is never stored.
        rows = (first + tl.minimum(units, count - 1)).to(tl.int64)
        gate = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
        up = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
        for d in range(0, D, BLOCK_D):
            columns = d + tl.arange(0, BLOCK_D)[None, :]
            x = load_columns(x_ptr + token * D, columns, D, BLOCK_D).to(tl.float32)
            gate += x * load_columns(residual_gate_ptr + rows[:, None] * D, columns, D, BLOCK_D).to(tl.float32)
            up += x * load_columns(residual_up_ptr + rows[:, None] * D, columns, D, BLOCK_D).to(tl.float32)
        j = tl.load(indices_ptr + rows)
        g = tl.load(g_ptr + token * H + j).to(tl.float32) + tl.sum(gate, 1)
        u = tl.load(u_ptr + token * H + j).to(tl.float32) + tl.sum(up, 1)
        h = activate(g, ACTIVATION) * u
        tl.store(h_ptr + pair * W + units, h.to(h_ptr.dtype.element_ty), mask=units < count)


@triton.jit  # type: ignore[untyped-decorator]
def hidden_many(
    x_ptr: tl.tensor,
    order_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    g_ptr: tl.tensor,
    u_ptr: tl.tensor,
    residual_gate_ptr: tl.tensor,
    residual_up_ptr: tl.tensor,
    indices_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    h_ptr: tl.tensor,
    E: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """For many tokens: program (stride, block) multiplies BLOCK_T pairs of one expert with BLOCK_R units at a time."""
    e, begin, end = locate(starts_ptr, tl.program_id(1), E, BLOCK_T, BLOCK_E)
    first, count = kept_range(offsets_ptr, e, E)
    places = begin + tl.arange(0, BLOCK_T)
    live = places < end
    pairs = tl.load(order_ptr + places, mask=live, other=0).to(tl.int64)
    tokens = pairs // K
    for start in range(tl.program_id(0) * BLOCK_R, count, tl.num_programs(0) * BLOCK_R):
        units = start + tl.arange(0, BLOCK_R)
        # Lanes past the end read a valid row of x or of the expert, and what they give is never stored.
        rows = (first + tl.minimum(units, count - 1)).to(tl.int64)
        gate = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
        up = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
        for d in range(0, D, BLOCK_D):
            columns = d + tl.arange(0, BLOCK_D)
            x = load_columns(x_ptr + tokens[:, None] * D, columns[None, :], D, BLOCK_D)
            residual_gate = load_columns(residual_gate_ptr + rows[None, :] * D, columns[:, None], D, BLOCK_D)
            residual_up = load_columns(residual_up_ptr + rows[None, :] * D, columns[:, None], D, BLOCK_D)
            gate = tl.dot(x, residual_gate, gate, input_precision="ieee")
            up = tl.dot(x, residual_up, up, input_precision="ieee")
        both = live[:, None] & (units < count)[None, :]
        j = tl.load(indices_ptr + rows)
        g = tl.load(g_ptr + tokens[:, None] * H + j[None, :]).to(tl.float32) + gate
        u = tl.load(u_ptr + tokens[:, None] * H + j[None, :]).to(tl.float32) + up
        h = activate(g, ACTIVATION) * u
        tl.store(h_ptr + pairs[:, None] * W + units[None, :], h.to(h_ptr.dtype.element_ty), mask=both)
