"""The backbone's products where it is stored in int8: as many bytes less are read as int8 is smaller.

Values are converted to the type of the tokens, which holds them exactly, and the scales are applied to the finished
sums. Rows of weights are the left operand: few tokens fill tensor cores better so, and a left operand can be multiplied
out of registers, where it was converted. Shape letters as in `triton_math`; T tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from forebay.kernels.parser_moe.triton_math import load_columns


@triton.jit  # type: ignore[untyped-decorator]
def hidden_int8(
    x_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    up_ptr: tl.tensor,
    gate_scale_ptr: tl.tensor,
    up_scale_ptr: tl.tensor,
    g_ptr: tl.tensor,
    u_ptr: tl.tensor,
    T: tl.tensor,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Program (block of H, block of T) writes g_TH and u_TH, before the activation."""
    # Rows past the end are valid ones again, and what they give is never stored.
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    tokens = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    j, t = tl.minimum(rows, H - 1).to(tl.int64), tl.minimum(tokens, T - 1).to(tl.int64)
    gate = tl.zeros([BLOCK_R, BLOCK_T], tl.float32)
    up = tl.zeros([BLOCK_R, BLOCK_T], tl.float32)
    for d in range(0, D, BLOCK_D):
        columns = d + tl.arange(0, BLOCK_D)
        x = load_columns(x_ptr + t[None, :] * D, columns[:, None], D, BLOCK_D)
        gate_rows = load_columns(gate_ptr + j[:, None] * D, columns[None, :], D, BLOCK_D)
        up_rows = load_columns(up_ptr + j[:, None] * D, columns[None, :], D, BLOCK_D)
        gate = tl.dot(gate_rows.to(x.dtype), x, gate, input_precision="ieee")
        up = tl.dot(up_rows.to(x.dtype), x, up, input_precision="ieee")
    gate *= tl.load(gate_scale_ptr + j)[:, None]
    up *= tl.load(up_scale_ptr + j)[:, None]
    places = t[None, :] * H + j[:, None]
    both = (rows < H)[:, None] & (tokens < T)[None, :]
    tl.store(g_ptr + places, gate.to(g_ptr.dtype.element_ty), mask=both)
    tl.store(u_ptr + places, up.to(u_ptr.dtype.element_ty), mask=both)


@triton.jit  # type: ignore[untyped-decorator]
def output_int8(
    mixed_ptr: tl.tensor,
    down_ptr: tl.tensor,
    down_scale_ptr: tl.tensor,
    added_ptr: tl.tensor,
    y_ptr: tl.tensor,
    T: tl.tensor,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Program (block of D, block of T) writes y_TD = added_TD + mixed_TH down^T; BLOCK_D is of H here."""
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    tokens = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    d, t = tl.minimum(rows, D - 1).to(tl.int64), tl.minimum(tokens, T - 1).to(tl.int64)
    sums = tl.zeros([BLOCK_R, BLOCK_T], tl.float32)
    for h in range(0, H, BLOCK_D):
        units = h + tl.arange(0, BLOCK_D)
        mixed = load_columns(mixed_ptr + t[None, :] * H, units[:, None], H, BLOCK_D)
        down = load_columns(down_ptr + d[:, None] * H, units[None, :], H, BLOCK_D)
        sums = tl.dot(down.to(mixed.dtype), mixed, sums, input_precision="ieee")
    places = t[None, :] * D + d[:, None]
    y = tl.load(added_ptr + places).to(tl.float32) + sums * tl.load(down_scale_ptr + d)[:, None]
    both = (rows < D)[:, None] & (tokens < T)[None, :]
    tl.store(y_ptr + places, y.to(y_ptr.dtype.element_ty), mask=both)
