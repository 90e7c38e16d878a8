"""A model of LLaDA's shape with random weights: narrow, but with as many layers, so that its depth table applies."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from forebay.diffusion.config import DiffusionConfig
from forebay.diffusion.families.base import PARTS
from forebay.diffusion.families.llada import LLADA
from forebay.diffusion.weights import LayerWeights, ModelWeights, take_apart

END, MASK = 0, 1


def llada_shape(
    *,
    layers: int = 32,
    hidden: int = 768,
    intermediate: int = 768,
    heads: int = 6,
    vocabulary: int = 8192,
    positions: int = 16_384,
) -> DiffusionConfig:
    """Attention, RMSNorm, RoPE, SwiGLU and an output layer of its own, as LLaDA-8B has them.

    LLaDA-8B: 32 layers, hidden 4,096, intermediate 12,288, 32 heads of 128, vocabulary 126,464.
    """
    return DiffusionConfig(
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=heads,
        head_size=hidden // heads,
        vocabulary=vocabulary,
        positions=positions,
        rope_theta=500_000.0,
        norm_epsilon=1e-5,
        mask_token=MASK,
        end_tokens=(),
    )


def random_weights(
    config: DiffusionConfig, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0
) -> ModelWeights:
    """Weights that keep states of about the same size in every layer."""
    random = torch.Generator(device).manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        made = torch.randn(rows, columns, generator=random, device=device, dtype=dtype)
        return made.mul_(columns**-0.5)

    def layer() -> LayerWeights:
        size = config.head_size
        return LayerWeights(
            attention_norm_D=torch.ones(config.hidden, dtype=dtype, device=device),
            qkv=matrix((config.heads + 2 * config.kv_heads) * size, config.hidden),
            qkv_bias=None,
            attention_output=matrix(config.hidden, config.heads * size),
            mlp_norm_D=torch.ones(config.hidden, dtype=dtype, device=device),
            gate_up=matrix(2 * config.intermediate, config.hidden),
            down_DI=matrix(config.hidden, config.intermediate),
        )

    return ModelWeights(
        config,
        matrix(config.vocabulary, config.hidden),
        [layer() for _ in range(config.layers)],
        torch.ones(config.hidden, dtype=dtype, device=device),
        matrix(config.vocabulary, config.hidden),
    )


def save(weights: ModelWeights, folder: Path, tokenizer: Path) -> None:
    """Write a model as LLaDA is published.

    Args:
        weights: all of it.
        folder: to be made.
        tokenizer: a folder whose tokenizer it gets.
    """
    config, family = weights.config, LLADA
    tensors = {
        f"{family.embedding}.weight": weights.embedding_VD,
        f"{family.norm}.weight": weights.norm_D,
        f"{family.output}.weight": weights.output_VD,
    }
    queries, pairs = config.heads * config.head_size, config.kv_heads * config.head_size
    for number, layer in enumerate(weights.layers):
        q, k, v = layer.qkv.split([queries, pairs, pairs])
        q, k = (take_apart(one, config.head_size) for one in (q, k))
        gate, up = layer.gate_up.chunk(2)
        parts = (layer.attention_norm_D, q, k, v, layer.attention_output, layer.mlp_norm_D, gate, up, layer.down_DI)
        for part, tensor in zip(PARTS, parts, strict=True):
            tensors[f"{family.layer.format(layer=number)}.{family.parts[part]}.weight"] = tensor.contiguous()
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    found = {
        "architectures": ["LLaDAModelLM"], "model_type": "llada", "d_model": config.hidden, "n_heads": config.heads,
        "n_kv_heads": config.kv_heads, "n_layers": config.layers, "mlp_hidden_size": config.intermediate,
        "vocab_size": config.vocabulary, "embedding_size": config.vocabulary, "rope_theta": config.rope_theta,
        "max_sequence_length": config.positions, "rms_norm_eps": config.norm_epsilon,
        "mask_token_id": config.mask_token, "eos_token_id": END, "weight_tying": False, "torch_dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(found))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder / name)
