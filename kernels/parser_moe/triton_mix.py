"""Router-weighted hidden values of all experts of a token, as the backbone's down projection takes them.

Shape letters as in `triton_math`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from forebay.kernels.parser_moe.triton_math import activate, kept_range


@triton.jit  # type: ignore[untyped-decorator]
def mix_hidden(
    ids_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    g_ptr: tl.tensor,
    u_ptr: tl.tensor,
    h_ptr: tl.tensor,
    indices_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    mixed_ptr: tl.tensor,
    E: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_H: tl.constexpr,
) -> None:
    """mixed_TH[t] = sum over k of w (hb + (h - hb) in the kept units), hb the backbone's own hidden values.

    One program per token, and its experts in turn: sums_TH (float32) needs no atomics, and an expert costs no more
    than the units that it keeps. The barriers let the threads of the program see each other's sums.
    """
    token = tl.program_id(0).to(tl.int64)
    row = token * H
    lanes = tl.arange(0, BLOCK_H)
    total = 0.0
    for k in range(K):
        e = tl.load(ids_ptr + token * K + k)
        total += tl.load(weights_ptr + token * K + k, mask=(e >= 0) & (e < E), other=0.0).to(tl.float32)
    for start in range(0, H, BLOCK_H):
        j = start + lanes
        g = tl.load(g_ptr + row + j, mask=j < H, other=0.0).to(tl.float32)
        u = tl.load(u_ptr + row + j, mask=j < H, other=0.0).to(tl.float32)
        tl.store(sums_ptr + row + j, total * activate(g, ACTIVATION) * u, mask=j < H)
    for k in range(K):
        tl.debug_barrier()
        pair = token * K + k
        first, count = kept_range(offsets_ptr, tl.load(ids_ptr + pair), E)
        w = tl.load(weights_ptr + pair).to(tl.float32)
        for start in range(0, count, BLOCK_H):
            units = start + lanes
            kept = units < count
            j = tl.load(indices_ptr + first + units, mask=kept, other=0)
            g = tl.load(g_ptr + row + j, mask=kept, other=0.0).to(tl.float32)
            u = tl.load(u_ptr + row + j, mask=kept, other=0.0).to(tl.float32)
            h = tl.load(h_ptr + pair * W + units, mask=kept, other=0.0).to(tl.float32)
            change = w * (h - activate(g, ACTIVATION) * u)
            sums = tl.load(sums_ptr + row + j, mask=kept, other=0.0)
            tl.store(sums_ptr + row + j, sums + change, mask=kept)
    tl.debug_barrier()
    for start in range(0, H, BLOCK_H):
        j = start + lanes
        sums = tl.load(sums_ptr + row + j, mask=j < H, other=0.0)
        tl.store(mixed_ptr + row + j, sums.to(mixed_ptr.dtype.element_ty), mask=j < H)
