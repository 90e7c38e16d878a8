"""Compressed copies of tiny models, and the dense reconstruction of each as a plain model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forebay.compression.checkpoint import ParserConfig, to_tensors
from forebay.compression.experts import Expert
from forebay.compression.families import find_family
from forebay.compression.layer import CompressedLayer, Options, compress_layer

ROWS = 32
COPIED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
EXPERTS = 8
SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 48,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
MLA = {"kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64}
"""What vLLM's CPU kernels for multi-head latent attention can do."""
DEEPSEEK = {
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    **MLA,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"num_experts": EXPERTS, "num_experts_per_tok": 4, "shared_expert_intermediate_size": 96},
    "olmoe": {"num_experts": EXPERTS, "num_experts_per_tok": 3},
    "mixtral": {"num_local_experts": EXPERTS, "num_experts_per_tok": 2},
    "deepseek_v3": {"n_group": 2, "topk_method": "noaux_tc", "scoring_func": "sigmoid", **DEEPSEEK},
}


def tiny_model(model_type: str, folder: Path) -> Path:
    """Two layers with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SIZES, **FAMILIES[model_type])
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def compress(
    source: Path, folder: Path, layers: list[int], rho: float = 0.9, backbone_dtype: Literal["model", "int8"] = "model"
) -> tuple[Path, Path]:
    """`folder/compressed` and `folder/dense`, both in float32, from random calibration rows."""
    weights = {name: tensor.float() for name, tensor in load_file(source / "model.safetensors").items()}
    config = json.loads((source / "config.json").read_text())
    config = {**config, "dtype": "float32", "torch_dtype": "float32"}
    family = find_family(config["model_type"])
    compressed, dense = dict(weights), dict(weights)
    options = Options(rho=rho, max_rounds=2, backbone_dtype=backbone_dtype)
    made = {layer: compress_one(weights, config, layer, options) for layer in layers}
    for layer, result in made.items():
        for expert in range(len(result.kept)):
            whole = result.dense(expert)
            for part, matrix in enumerate((whole.gate_HD, whole.up_HD, whole.down_DH)):
                name = family.expert_tensor(layer, expert, part)
                del compressed[name]
                dense[name] = matrix.contiguous()
        compressed |= to_tensors(family.prefix(layer), result)
    described = {**config, "quantization_config": describe(made, rho).model_dump(mode="json")}
    return write(source, folder / "compressed", compressed, described), write(source, folder / "dense", dense, config)


def compress_one(weights: dict[str, Tensor], config: dict[str, Any], layer: int, options: Options) -> CompressedLayer:
    family = find_family(config["model_type"])
    experts = [
        Expert(*(weights[family.expert_tensor(layer, expert, part)] for part in range(3)))
        for expert in range(family.expert_count(config))
    ]
    random = torch.Generator().manual_seed(layer)
    rows = [torch.randn(ROWS, config["hidden_size"], generator=random) for _ in experts]
    return compress_layer(experts, rows, options)


def describe(made: dict[int, CompressedLayer], rho: float) -> ParserConfig:
    first = next(iter(made.values()))
    units, size = first.backbone.gate_HD.shape
    kept = {layer: [len(units) for units in result.kept] for layer, result in made.items()}
    experts = len(first.kept)
    return ParserConfig(
        rho=rho, activation="silu", experts=experts, hidden_units=units, hidden_size=size, kept=kept,
        backbone_dtype="int8" if first.int8 else None,
    )  # fmt: skip


def write(source: Path, folder: Path, weights: dict[str, Tensor], config: dict[str, Any]) -> Path:
    """A folder like `source` with other weights, in shards whose order is that of no layer."""
    folder.mkdir(parents=True)
    for file in COPIED:
        if (source / file).exists():
            shutil.copy(source / file, folder)
    (folder / "config.json").write_text(json.dumps(config))
    shards = [dict(list(weights.items())[first::3]) for first in range(3)]
    where = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-00003.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def damage(source: Path, folder: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """A copy of a folder whose tensors `change` has altered."""
    weights = {}
    for shard in sorted(source.glob("*.safetensors")):
        weights |= load_file(shard)
    change(weights)
    return write(source, folder, weights, json.loads((source / "config.json").read_text()))
