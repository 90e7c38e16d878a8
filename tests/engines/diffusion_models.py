"""Tiny models with random weights in the folder layouts of LLaDA and Dream, remote code and all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from forebay.diffusion.families import find_family

TINY = Path(__file__).parents[1] / "assets" / "tinydlm-prefix"
LAYERS, HIDDEN, INTERMEDIATE, HEADS, VOCABULARY = 4, 64, 96, 4, 4096
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
SPECIAL = ("<|endoftext|>", "<|mask|>", "<|pad|>", "<|im_start|>", "<|im_end|>")

LLADA: dict[str, Any] = {
    "architectures": ["LLaDAModelLM"],
    "model_type": "llada",
    "auto_map": {
        "AutoConfig": "configuration_llada.LLaDAConfig",
        "AutoModelForCausalLM": "modeling_llada.LLaDAModelLM",
        "AutoModel": "modeling_llada.LLaDAModelLM",
    },
    "d_model": HIDDEN,
    "n_heads": HEADS,
    "n_kv_heads": HEADS,
    "n_layers": LAYERS,
    "mlp_hidden_size": INTERMEDIATE,
    "max_sequence_length": 256,
    "vocab_size": VOCABULARY,
    "embedding_size": VOCABULARY,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-05,
    "weight_tying": False,
    "mask_token_id": 1,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "torch_dtype": "bfloat16",
    "use_cache": False,
    "activation_type": "silu",
    "alibi": False,
    "block_type": "llama",
    "include_bias": False,
    "include_qkv_bias": False,
    "init_device": "meta",
    "layer_norm_type": "rms",
    "multi_query_attention": None,
    "precision": "amp_bf16",
    "rope": True,
    "rope_full_precision": True,
    "scale_logits": False,
}
DREAM: dict[str, Any] = {
    "architectures": ["DreamModel"],
    "model_type": "Dream",
    "auto_map": {
        "AutoConfig": "configuration_dream.DreamConfig",
        "AutoModel": "modeling_dream.DreamModel",
    },
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS // 2,
    "max_position_embeddings": 256,
    "vocab_size": VOCABULARY,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False,
    "mask_token_id": VOCABULARY - 4,
    "bos_token_id": VOCABULARY - 5,
    "eos_token_id": VOCABULARY - 5,
    "pad_token_id": VOCABULARY - 3,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}


def llada_model(folder: Path) -> Path:
    """LLaDA's layout: its own names, a tokenizer of the generic fast class."""
    _write(folder, LLADA, biases=False)
    (folder / "configuration_llada.py").write_text("raise RuntimeError('remote code ran')\n")
    shutil.copy(TINY / "tokenizer.json", folder)
    _json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|endoftext|>",
            "eos_token": "<|endoftext|>",
            "pad_token": "<|endoftext|>",
            "chat_template": TEMPLATE,
            "clean_up_tokenization_spaces": False,
        },
    )
    _json(folder / "generation_config.json", {"_from_model_config": True, "bos_token_id": 0, "eos_token_id": 0})
    return folder


def dream_model(folder: Path) -> Path:
    """Dream's layout: Qwen's names, a byte-pair tokenizer with a class of its own and special tokens at the end, and
    settings of another sampler."""
    _write(folder, DREAM, biases=True)
    for name in ("configuration_dream.py", "tokenization_dream.py"):
        (folder / name).write_text("raise RuntimeError('remote code ran')\n")
    found = json.loads((TINY / "tokenizer.json").read_text())["model"]
    plain = {token: number - len(SPECIAL) for token, number in found["vocab"].items() if token not in SPECIAL}
    _json(folder / "vocab.json", plain)
    merges = [one if isinstance(one, str) else " ".join(one) for one in found["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    _json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "DreamTokenizer",
            "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
            "added_tokens_decoder": {
                str(place): {"content": name, **flags} for place, name in enumerate(SPECIAL, len(plain))
            },
            "bos_token": "<|endoftext|>",
            "eos_token": "<|endoftext|>",
            "mask_token": "<|mask|>",
            "pad_token": "<|pad|>",
            "chat_template": TEMPLATE,
            "model_max_length": 256,
        },
    )
    _json(
        folder / "generation_config.json",
        {"eos_token_id": VOCABULARY - 5, "top_k": 50, "repetition_penalty": 1.1},
    )
    return folder


def _json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content))


def _write(folder: Path, config: dict[str, Any], biases: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    _json(folder / "config.json", config)
    family = find_family(config)
    sizes = family.read(config)
    keys = sizes.kv_heads * sizes.head_size
    shapes = {
        "attention_norm": (HIDDEN,), "mlp_norm": (HIDDEN,), "query": (HIDDEN, HIDDEN), "key": (keys, HIDDEN),
        "value": (keys, HIDDEN), "attention_output": (HIDDEN, HIDDEN), "gate": (INTERMEDIATE, HIDDEN),
        "up": (INTERMEDIATE, HIDDEN), "down": (HIDDEN, INTERMEDIATE),
    }  # fmt: skip
    random = torch.Generator().manual_seed(0)
    weights = {f"{family.embedding}.weight": torch.randn(VOCABULARY, HIDDEN, generator=random)}
    for layer in range(LAYERS):
        for part, shape in shapes.items():
            name = f"{family.layer.format(layer=layer)}.{family.parts[part]}"
            weight = torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=random) / 8
            weights[f"{name}.weight"] = weight
            if biases and part in ("query", "key", "value"):
                weights[f"{name}.bias"] = torch.randn(shape[0], generator=random) / 8
    weights[f"{family.norm}.weight"] = torch.ones(HIDDEN)
    weights[f"{family.output}.weight"] = torch.randn(VOCABULARY, HIDDEN, generator=random)
    save_file({name: one.bfloat16() for name, one in weights.items()}, folder / "model.safetensors")
