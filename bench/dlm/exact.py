"""`exact_mode_maxdiff`: logits where nothing is reused that changes them, through every path of the runtime.

At b = 0 a pass over everything, a pass against keys and values that the one before left, and a pass over one block
among kept rows have to give what a plain bidirectional forward pass gives, written down separately in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from forebay.bench.dlm.quality import MODEL
from forebay.bench.dlm.shape import llada_shape, random_weights
from forebay.bench.suite import Context, Measurement
from forebay.diffusion.decoding import DecodingSettings
from forebay.diffusion.passes import BLOCK_CACHES, Passes, Span
from forebay.diffusion.prefix import PrefixStates
from forebay.diffusion.transformer import Transformer
from forebay.diffusion.weights import ModelWeights, load

PREFIXES = (0, 1, 90)
REST = 40


def measure(context: Context) -> Measurement:
    """The largest difference of any logit, over models, prefixes and caches."""
    models = {
        "trained": load(MODEL),
        "random": random_weights(llada_shape(layers=4, hidden=256, intermediate=512, heads=4, vocabulary=1000)),
    }
    found = {}
    for name, weights in models.items():
        context.say(name)
        transformer = Transformer(weights)
        tokens = torch.randint(5, 1000, (max(PREFIXES) + REST,), generator=torch.Generator().manual_seed(0))
        for prefix in PREFIXES:
            for cache in BLOCK_CACHES:
                mine = tokens[: prefix + REST]
                found[f"{name}, prefix {prefix}, block cache {cache}"] = _difference(transformer, mine, prefix, cache)
    return Measurement({"exact_mode_maxdiff": max(found.values())}, {"differences": found})


def _difference(transformer: Transformer, tokens: Tensor, prefix: int, cache: str) -> float:
    expected = plain_logits(transformer.weights, tokens)[prefix:]
    block = Span(8, 24)
    settings = DecodingSettings(block_cache=cache)  # type: ignore[arg-type]
    passes = Passes(transformer, PrefixStates(tokens[:prefix]), 0, 1, settings.block_cache, 0.97)
    passes_reused = Passes(transformer, PrefixStates(tokens[:prefix]), 0, 100, settings.block_cache, 0.97)
    differences = []
    for one in (passes, passes_reused):
        for begins in (True, False, False):
            wanted = torch.arange(block.first, block.last)
            (computed,) = transformer.run([one.rows(tokens[prefix:], block, wanted, begins)])
            one.take(computed, begins)
            differences.append((transformer.logits(computed.hidden_ND) - expected[wanted]).abs().max())
    return float(torch.stack(differences).max())


def plain_logits(weights: ModelWeights, tokens: Tensor) -> Tensor:
    """A bidirectional forward pass over one sequence, with nothing of the runtime in it, (N, V)."""
    config, count = weights.config, len(tokens)
    half = config.head_size // 2
    frequency = config.rope_theta ** (-torch.arange(half).double() / half)
    angle = torch.outer(torch.arange(count).double(), frequency)
    cos, sin = angle.cos().float()[:, None], angle.sin().float()[:, None]

    def rotate(x: Tensor) -> Tensor:
        one, two = x[..., ::2], x[..., 1::2]
        return torch.stack([one * cos - two * sin, two * cos + one * sin], -1).flatten(-2)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + config.norm_epsilon) * weight

    x = weights.embedding_VD[tokens]
    for layer in weights.layers:
        qkv = functional.linear(norm(x, layer.attention_norm_D), layer.qkv, layer.qkv_bias)
        q, k, v = qkv.view(count, -1, config.head_size).split([config.heads, config.kv_heads, config.kv_heads], 1)
        repeat = config.heads // config.kv_heads
        k, v = rotate(k).repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        chances = torch.einsum("qhs,khs->hqk", rotate(q), k).mul(config.head_size**-0.5).softmax(-1)
        x = x + torch.einsum("hqk,khs->qhs", chances, v).reshape(count, -1) @ layer.attention_output.T
        gate, up = (norm(x, layer.mlp_norm_D) @ layer.gate_up.T).chunk(2, -1)
        x = x + (functional.silu(gate) * up) @ layer.down_DI.T
    return norm(x, weights.norm_D) @ weights.output_VD.T
