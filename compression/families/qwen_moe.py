"""Qwen1.5-MoE, Qwen2-MoE and Qwen3-MoE."""

from forebay.compression.families.base import Family

QWEN_MOE = Family(model_types=("qwen2_moe", "qwen3_moe"), last_layers={24: 16})
