"""Linear layers for few rows on the CPU: our C kernel where it is faster than torch's libraries, those elsewhere.

A BLAS first puts the weights into an order of its own, which pays when many rows pass them. With some 32 rows, the
block of a diffusion model, that takes nearly as long as the products. The kernel transposes the rows instead, and reads
the weights as they lie; those of 16 bits are converted on the way. Sums are float32, in the order of the elements.

Shape letters: M rows, K elements of a row, N rows of weights.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor
from torch.nn import functional

from forebay.kernels import _cpu
from forebay.kernels.cpu import ELEMENTS, VARIANTS

LEAST_ROWS = {torch.float32: 2, torch.bfloat16: 3, torch.float16: 4}
"""Torch reads the weights of fewer rows as they lie too, and faster."""
MOST_ROWS = {torch.float32: 128, torch.bfloat16: sys.maxsize, torch.float16: sys.maxsize}
"""From some 200 rows on, a BLAS's order pays for float32. Where the processor has no instruction for products of 16-bit
numbers, torch takes several times as long as the kernel, however many rows there are."""
NONE = sys.maxsize, 0


def _limits() -> dict[torch.dtype, tuple[int, int]]:
    """Fewest and most rows that are the kernel's, by type; measured with MKL and oneDNN on a processor with AVX2.

    Types that the processor multiplies by instructions which torch uses and the kernel does not are torch's.
    """
    if VARIANTS[0] == "portable":
        return {}
    torchs = {
        torch.bfloat16: torch.cpu._is_avx512_bf16_supported(),
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported(),
    }
    return {dtype: (LEAST_ROWS[dtype], MOST_ROWS[dtype]) for dtype in ELEMENTS if not torchs.get(dtype, False)}


LIMITS = _limits()


def linear(x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None, *, variant: str | None = None) -> Tensor:
    """y_MN = x w^T + bias, as `torch.nn.functional.linear` without gradients.

    Results do not depend on the number of threads. What the kernel cannot read (other types, shapes and devices,
    weights that are not contiguous) is torch's.

    Args:
        variant: the kernel of that instruction set, one of `cpu.VARIANTS`, for any number of rows; where it is None,
            the faster of torch and the best kernel.
    """
    if variant is None:
        least, most = LIMITS.get(weight_NK.dtype, NONE)
        if not least <= x_MK.shape[0] <= most:
            return functional.linear(x_MK, weight_NK, bias_N)
        variant = VARIANTS[0]
    if not _readable(x_MK, weight_NK, bias_N):
        return functional.linear(x_MK, weight_NK, bias_N)
    return _kernel(x_MK.contiguous(), weight_NK, bias_N, variant)


def _kernel(x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, variant: str) -> Tensor:
    m, k = x_MK.shape
    n = weight_NK.shape[0]
    y_MN = torch.empty(m, n, dtype=x_MK.dtype)
    addresses = y_MN.data_ptr(), x_MK.data_ptr(), weight_NK.data_ptr(), 0 if bias_N is None else bias_N.data_ptr()
    elements = ELEMENTS[x_MK.dtype]
    _cpu.linear(variant, (elements, elements), torch.get_num_threads(), addresses, (m, n, k))
    return y_MN


def _readable(x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> bool:
    """Whether the kernel would read what is there; called for every product."""
    dtype, shape = x_MK.dtype, weight_NK.shape
    return (
        x_MK.is_cpu
        and weight_NK.is_cpu
        and dtype in ELEMENTS
        and dtype is weight_NK.dtype
        and x_MK.dim() == len(shape) == 2
        and x_MK.shape[1] == shape[1] != 0
        and weight_NK.is_contiguous()
        and (bias_N is None or _addable(bias_N, dtype, shape[0]))
    )


def _addable(bias_N: Tensor, dtype: torch.dtype, n: int) -> bool:
    return bias_N.is_cpu and bias_N.dtype is dtype and bias_N.shape == (n,) and bias_N.is_contiguous()
