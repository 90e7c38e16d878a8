"""Dream-7B (`DreamModel`): the shape of Qwen2.5, logits one place to the left."""

from __future__ import annotations

from functools import partial

from forebay.diffusion.families.base import LLAMA_PARTS, Family, read_llama

DREAM = Family(
    name="Dream",
    architectures=("DreamModel",),
    read=partial(read_llama, shifted=True, qkv_bias=True),
    parts=LLAMA_PARTS,
)
