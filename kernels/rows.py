"""Operations on every row by itself: our C kernels on a CPU, torch's elsewhere.

A row of a few hundred elements takes less time than the five calls of torch that its norm consists of. They compute in
float32 and round once.

Shape letters: N rows, D elements of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from forebay.kernels import _cpu
from forebay.kernels.cpu import ELEMENTS, VARIANTS


def rms_norm(x_ND: Tensor, weight_D: Tensor, epsilon: float, *, variant: str = VARIANTS[0]) -> Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight (arXiv 1910.07467)."""
    weight = weight_D.dtype, weight_D.shape, weight_D.is_cpu, weight_D.is_contiguous()
    if not _readable(x_ND) or weight != (x_ND.dtype, x_ND.shape[1:], True, True):
        return functional.rms_norm(x_ND, weight_D.shape, weight_D, epsilon)
    return _kernel(x_ND, weight_D.data_ptr(), epsilon, x_ND.shape[1], variant)


def silu_and_mul(x_N2D: Tensor, *, variant: str = VARIANTS[0]) -> Tensor:
    """SiLU of the first half of every row times the second half (the middle of SwiGLU, arXiv 2002.05202), (N, D)."""
    if not _readable(x_N2D) or x_N2D.shape[1] % 2:
        gate, up = x_N2D.chunk(2, dim=-1)
        return functional.silu(gate) * up
    return _kernel(x_N2D, 0, 0.0, x_N2D.shape[1] // 2, variant)


def _kernel(x: Tensor, weight: int, epsilon: float, size: int, variant: str) -> Tensor:
    y_ND = torch.empty(len(x), size, dtype=x.dtype)
    addresses = y_ND.data_ptr(), x.data_ptr(), weight
    _cpu.rows(variant, ELEMENTS[x.dtype], torch.get_num_threads(), addresses, (len(x), size), epsilon)
    return y_ND


def _readable(x: Tensor) -> bool:
    """Whether the kernels read it: on the CPU, contiguous, of a type they know, and not empty."""
    return x.is_cpu and x.dtype in ELEMENTS and x.dim() == 2 and x.shape[1] != 0 and x.is_contiguous()
