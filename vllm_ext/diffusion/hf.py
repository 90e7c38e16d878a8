"""Configurations and the tokenizer that LLaDA and Dream folders bring as remote code, as classes of our own."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, Qwen2Tokenizer


class LLaDAConfig(PreTrainedConfig):
    """`config.json` of LLaDA, with the names that vLLM asks for beside LLaDA's own."""

    model_type = "llada"
    attribute_map = {  # noqa: RUF012 (a dictionary by transformers' contract)
        "hidden_size": "d_model",
        "num_attention_heads": "n_heads",
        "num_key_value_heads": "n_kv_heads",
        "num_hidden_layers": "n_layers",
        "intermediate_size": "mlp_hidden_size",
        "max_position_embeddings": "max_sequence_length",
    }


class DreamConfig(PreTrainedConfig):
    """`config.json` of Dream."""

    model_type = "Dream"


class DreamTokenizer(Qwen2Tokenizer):
    """Dream's byte-pair encoding, which is Qwen 2's with other special tokens."""


def register() -> None:
    """Make the classes known to transformers and vLLM, which then run none of the folders' code."""
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    known: list[tuple[str, type[Any]]] = [("llada", LLaDAConfig), ("Dream", DreamConfig)]
    for name, config in known:
        if name not in _CONFIG_REGISTRY:
            _CONFIG_REGISTRY[name] = config
            AutoConfig.register(name, config, exist_ok=True)
    AutoTokenizer.register(DreamConfig, DreamTokenizer, exist_ok=True)
