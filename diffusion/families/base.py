"""What a family of diffusion models is: how it names its settings and its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from forebay.diffusion.config import DiffusionConfig

PARTS = (
    "attention_norm", "query", "key", "value", "attention_output", "mlp_norm", "gate", "up", "down",
)  # fmt: skip
"""Weights of a layer."""
LLAMA_PARTS = dict(
    zip(
        PARTS,
        (
            "input_layernorm",
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "self_attn.o_proj",
            "post_attention_layernorm",
            "mlp.gate_proj",
            "mlp.up_proj",
            "mlp.down_proj",
        ),
        strict=True,
    )
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One family of models."""

    name: str
    architectures: tuple[str, ...]
    """`architectures` in `config.json`."""
    read: Callable[[Mapping[str, Any]], DiffusionConfig]
    """Makes our configuration of theirs; KeyError names a setting that is missing."""
    embedding: str = "model.embed_tokens"
    layer: str = "model.layers.{layer}"
    parts: Mapping[str, str]
    """Names of the `PARTS` within a layer."""
    norm: str = "model.norm"
    output: str = "lm_head"


def end_tokens(config: Mapping[str, Any]) -> tuple[int, ...]:
    """`eos_token_id`, which is one or a list."""
    found = config["eos_token_id"]
    return tuple(found) if isinstance(found, list) else (int(found),)


def read_llama(config: Mapping[str, Any], *, shifted: bool, qkv_bias: bool) -> DiffusionConfig:
    """From the settings that models of Llama's and Qwen's shape share."""
    heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
    return DiffusionConfig(
        layers=int(config["num_hidden_layers"]),
        hidden=hidden,
        intermediate=int(config["intermediate_size"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_size=int(config.get("head_dim") or hidden // heads),
        vocabulary=int(config["vocab_size"]),
        positions=int(config["max_position_embeddings"]),
        rope_theta=float(config["rope_theta"]),
        norm_epsilon=float(config["rms_norm_eps"]),
        mask_token=int(config["mask_token_id"]),
        end_tokens=end_tokens(config),
        shifted=shifted,
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=qkv_bias,
    )
