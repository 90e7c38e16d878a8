"""Sizes and habits of a diffusion language model, whatever its family calls them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class DiffusionConfig:
    """A Llama-shaped transformer that attends in both directions: RMSNorm, RoPE (rotate-half), SwiGLU."""

    layers: int
    """L."""
    hidden: int
    """D."""
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    positions: int
    """The longest sequence the model was made for."""
    rope_theta: float
    norm_epsilon: float
    mask_token: int
    end_tokens: tuple[int, ...]
    """Any of them ends an answer."""
    shifted: bool = False
    """Whether the logits at position i - 1 are those of token i (Dream), instead of the ones at i (LLaDA)."""
    tied: bool = False
    """Whether the output layer is the embedding."""
    qkv_bias: bool = False
