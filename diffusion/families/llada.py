"""LLaDA-8B and LLaDA-1.5 (`LLaDAModelLM`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forebay.diffusion.config import DiffusionConfig
from forebay.diffusion.families.base import PARTS, Family, end_tokens


def _read(config: Mapping[str, Any]) -> DiffusionConfig:
    heads, hidden = int(config["n_heads"]), int(config["d_model"])
    return DiffusionConfig(
        layers=int(config["n_layers"]),
        hidden=hidden,
        intermediate=int(config["mlp_hidden_size"]),
        heads=heads,
        kv_heads=int(config.get("n_kv_heads") or heads),
        head_size=hidden // heads,
        vocabulary=int(config.get("embedding_size") or config["vocab_size"]),
        positions=int(config["max_sequence_length"]),
        rope_theta=float(config["rope_theta"]),
        norm_epsilon=float(config["rms_norm_eps"]),
        mask_token=int(config["mask_token_id"]),
        end_tokens=end_tokens(config),
        tied=bool(config.get("weight_tying", False)),
    )


LLADA = Family(
    name="LLaDA",
    architectures=("LLaDAModelLM",),
    read=_read,
    embedding="model.transformer.wte",
    layer="model.transformer.blocks.{layer}",
    parts=dict(
        zip(
            PARTS,
            ("attn_norm", "q_proj", "k_proj", "v_proj", "attn_out", "ff_norm", "ff_proj", "up_proj", "ff_out"),
            strict=True,
        )
    ),
    norm="model.transformer.ln_f",
    output="model.transformer.ff_out",
)
