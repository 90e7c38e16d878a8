"""Residual down product: sum over the kept units of w h residual_down, what an expert adds to the backbone's output.

Shape letters as in `triton_math`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from forebay.kernels.parser_moe.triton_group import locate
from forebay.kernels.parser_moe.triton_math import kept_range, load_columns


@triton.jit  # type: ignore[untyped-decorator]
def down_few(
    ids_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    h_ptr: tl.tensor,
    residual_down_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    y_ptr: tl.tensor,
    E: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """For few tokens: program (token, block of D) writes y_TD, the sum over the token's experts."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    lanes = tl.arange(0, BLOCK_R)
    sums = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    for k in range(K):
        pair = token * K + k
        first, count = kept_range(offsets_ptr, tl.load(ids_ptr + pair), E)
        w = tl.load(weights_ptr + pair).to(tl.float32)
        for start in range(0, count, BLOCK_R):
            units = start + lanes
            h = tl.load(h_ptr + pair * W + units, mask=units < count, other=0.0).to(tl.float32)
            rows = (first + tl.minimum(units, count - 1)).to(tl.int64)[:, None]
            down = load_columns(residual_down_ptr + rows * D, columns[None, :], D, BLOCK_D)
            sums += (w * h)[:, None] * down.to(tl.float32)
    y = tl.sum(sums, 0)
    tl.store(y_ptr + token * D + columns, y.to(y_ptr.dtype.element_ty), mask=columns < D)


@triton.jit  # type: ignore[untyped-decorator]
def down_many(
    order_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    h_ptr: tl.tensor,
    residual_down_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    y_ptr: tl.tensor,
    E: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """For many tokens: program (block of D, block of pairs) writes y_PD; zeros for pairs that are not this rank's."""
    e, begin, end = locate(starts_ptr, tl.program_id(1), E, BLOCK_T, BLOCK_E)
    first, count = kept_range(offsets_ptr, e, E)
    places = begin + tl.arange(0, BLOCK_T)
    live = places < end
    pairs = tl.load(order_ptr + places, mask=live, other=0).to(tl.int64)
    columns = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    sums = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    for start in range(0, count, BLOCK_R):
        units = start + tl.arange(0, BLOCK_R)
        # Zeros past the end: that part of h was never written.
        h = tl.load(h_ptr + pairs[:, None] * W + units[None, :], mask=(units < count)[None, :], other=0.0)
        rows = (first + tl.minimum(units, count - 1)).to(tl.int64)[:, None]
        down = load_columns(residual_down_ptr + rows * D, columns[None, :], D, BLOCK_D)
        sums = tl.dot(h, down, sums, input_precision="ieee")
    w = tl.load(weights_ptr + pairs, mask=live, other=0.0).to(tl.float32)
    both = live[:, None] & (columns < D)[None, :]
    y = (sums * w[:, None]).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + pairs[:, None] * D + columns[None, :], y, mask=both)
