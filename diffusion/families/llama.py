"""Plain Llama weights that were trained as a diffusion model: `is_causal` is false and there is a mask token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forebay.diffusion.config import DiffusionConfig
from forebay.diffusion.families.base import LLAMA_PARTS, Family, read_llama


def _read(config: Mapping[str, Any]) -> DiffusionConfig:
    if config.get("is_causal", True):
        raise KeyError("is_causal: false")
    shifted = "dream style" in str(config.get("diffusion", "")).lower()
    return read_llama(config, shifted=shifted, qkv_bias=bool(config.get("attention_bias", False)))


LLAMA = Family(name="Llama", architectures=("LlamaForCausalLM",), read=_read, parts=LLAMA_PARTS)
