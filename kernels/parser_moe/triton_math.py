"""Pieces that the Triton kernels share: the activation, and where the kept units of an expert lie.

Shape letters as in `weights`; P = T K pairs of (token, expert), numbered t K + k, and W the width of a pair's row of h.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def activate(g: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    """Activation of the gate in float32; the names are those of `reference.ACTIVATIONS`."""
    if ACTIVATION == "silu":
        return g * tl.sigmoid(g)
    elif ACTIVATION == "gelu":  # noqa: RET505 - Triton drops the branches not taken only from if/else
        return 0.5 * g * (1.0 + tl.math.erf(g * 0.7071067811865476))
    else:
        tl.static_assert(ACTIVATION == "gelu_tanh")
        # 0.5 (1 + tanh z) = sigmoid(2 z)
        return g * tl.sigmoid(1.5957691216057308 * (g + 0.044715 * g * g * g))


@triton.jit  # type: ignore[untyped-decorator]
def kept_range(offsets_ptr: tl.tensor, e: tl.tensor, E: tl.constexpr) -> tl.tensor:
    """First row of expert `e` in the residuals, and how many it has: none where `e` is not one of this rank's."""
    ours = (e >= 0) & (e < E)
    first = tl.load(offsets_ptr + e, mask=ours, other=0)
    return first, tl.load(offsets_ptr + e + 1, mask=ours, other=0) - first


@triton.jit  # type: ignore[untyped-decorator]
def load_columns(rows_ptr: tl.tensor, columns: tl.tensor, D: tl.constexpr, BLOCK_D: tl.constexpr) -> tl.tensor:
    """Columns of rows of D values, zero past the end; without a mask where blocks fill the row exactly."""
    if D % BLOCK_D == 0:
        return tl.load(rows_ptr + columns)
    else:  # noqa: RET505 - as above
        return tl.load(rows_ptr + columns, mask=columns < D, other=0.0)
