"""A model of LLaDA's shape with random weights: narrow, but with as many layers, so that its depth table applies."""

from __future__ import annotations

import torch

from forebay.diffusion.config import DiffusionConfig
from forebay.diffusion.weights import LayerWeights, ModelWeights

MASK = 1


def llada_shape(
    *, layers: int = 32, hidden: int = 768, intermediate: int = 768, heads: int = 12, vocabulary: int = 8192
) -> DiffusionConfig:
    """Attention, RMSNorm, RoPE, SwiGLU and an output layer of its own, as LLaDA-8B has them.

    LLaDA-8B: 32 layers, hidden 4,096, intermediate 12,288, 32 heads, vocabulary 126,464.
    """
    return DiffusionConfig(
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=heads,
        head_size=hidden // heads,
        vocabulary=vocabulary,
        positions=16_384,
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
