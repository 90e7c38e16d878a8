"""Tiny models with random weights, for what the trained one does not have: sliding windows, adapters."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.engines.harness import MODEL, VOCABULARY

TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def sliding_window_model(folder: Path) -> Path:
    """Gemma 3 with alternating sliding-window (256 tokens) and full attention: two KV-cache groups."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=4096,
        sliding_window=256,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    Gemma3ForCausalLM(config).save_pretrained(folder)
    for name in TOKENIZER:
        shutil.copy(MODEL / name, folder)
    return folder


def dense_model(folder: Path) -> Path:
    """A Qwen 3 without experts: vLLM's adapters for experts need Triton, which has no CPU backend."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=4096,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    for name in TOKENIZER:
        shutil.copy(MODEL / name, folder)
    return folder


def adapter(folder: Path, model: Path, seed: int, rank: int = 8) -> Path:
    """A LoRA adapter of a model's query and value projections, strong enough to change answers."""
    config = json.loads((model / "config.json").read_text())
    hidden, head = config["hidden_size"], config["head_dim"]
    sizes = {"q_proj": config["num_attention_heads"] * head, "v_proj": config["num_key_value_heads"] * head}
    random = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for projection, size in sizes.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{projection}"
            weights[f"{name}.lora_A.weight"] = torch.randn(rank, hidden, generator=random)
            weights[f"{name}.lora_B.weight"] = torch.randn(size, rank, generator=random)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": list(sizes),
        "base_model_name_or_path": str(model),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def revised_model(folder: Path) -> Path:
    """The trained model with one weight changed: a new revision under the same name."""
    shutil.copytree(MODEL, folder, dirs_exist_ok=True)
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if "k_proj" in name)
    weights[name] = weights[name] * 1.5
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
