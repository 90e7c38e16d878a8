"""What all our C kernels have in common: instruction sets and types of elements."""

from __future__ import annotations

import torch  # before the kernels: both must share torch's OpenMP

from forebay.kernels import _cpu

VARIANTS = tuple(_cpu.variants())
"""Instruction sets that this processor can run, best first."""
ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Numbers of the types that rows and weights may have."""
