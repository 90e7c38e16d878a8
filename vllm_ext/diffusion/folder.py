"""What is read from a model's folder beside its weights."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from forebay.diffusion.markers import Markers, learn_markers
from forebay.diffusion.prefixes import PrefixFinder
from forebay.diffusion.weights import read_config

logger = logging.getLogger(__name__)
FILES = ["*.safetensors", "*.json"]
"""Of a model on the hub; none of its code."""


def model_folder(vllm_config: Any) -> Path:
    """Where the model is, after a download if it is named by its id on the hub."""
    model = vllm_config.model_config
    if Path(model.model).is_dir():
        return Path(model.model)
    from huggingface_hub import snapshot_download

    cache = vllm_config.load_config.download_dir
    return Path(snapshot_download(model.model, revision=model.revision, cache_dir=cache, allow_patterns=FILES))


def make_finder(vllm_config: Any) -> PrefixFinder:
    """What finds the prefixes of prompts, for a model's chat template."""
    _, config = read_config(model_folder(vllm_config))
    return PrefixFinder(_markers(vllm_config.model_config), shifted=config.shifted)


def _markers(model_config: Any) -> Markers:
    """Of the template in the model's folder: one given by --chat-template is known to the API server alone."""
    from vllm.tokenizers import cached_tokenizer_from_config

    if model_config.skip_tokenizer_init:
        return Markers()
    tokenizer = cached_tokenizer_from_config(model_config)
    if not getattr(tokenizer, "chat_template", None):
        return Markers()

    def render(messages: list[dict[str, str]]) -> list[int]:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(tokenizer.encode(text, add_special_tokens=False))

    return learn_markers(render)
