"""A diffusion transformer as plainly as it can be written, for one sequence: the oracle of the runtime."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor


class Naive:
    """Reads Llama tensor names; float64; no cache, no batch."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.weights = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in range(self.config["num_hidden_layers"]):
            x = self.layer(layer, x)
        return self.head(x)

    def head(self, x: Tensor) -> Tensor:
        return self.norm(x, "model.norm") @ self.weights["model.embed_tokens.weight"].T

    def embed(self, tokens: Tensor) -> Tensor:
        return self.weights["model.embed_tokens.weight"][tokens]

    def layer(self, layer: int, x: Tensor) -> Tensor:
        x = x + self.attention(layer, self.norm(x, f"model.layers.{layer}.input_layernorm"))
        return x + self.mlp(layer, self.norm(x, f"model.layers.{layer}.post_attention_layernorm"))

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]).rsqrt()
        return x * scale * self.weights[f"{name}.weight"]

    def project(self, layer: int, name: str, x: Tensor) -> Tensor:
        return x @ self.weights[f"model.layers.{layer}.{name}.weight"].T

    def attention(self, layer: int, x: Tensor) -> Tensor:
        heads, size = self.config["num_attention_heads"], self.config["head_dim"]
        q, k, v = (self.project(layer, f"self_attn.{one}_proj", x).view(len(x), heads, size) for one in "qkv")
        q, k = self.rotate(q), self.rotate(k)
        chances = torch.einsum("qhs,khs->hqk", q, k).div(size**0.5).softmax(-1)
        mixed = torch.einsum("hqk,khs->qhs", chances, v).reshape(len(x), -1)
        return self.project(layer, "self_attn.o_proj", mixed)

    def rotate(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        frequency = self.config["rope_theta"] ** (-torch.arange(half).double() / half)
        turn = torch.polar(torch.ones(len(x), 1, half).double(), torch.outer(torch.arange(len(x)), frequency)[:, None])
        turned = torch.complex(x[..., :half], x[..., half:]) * turn
        return torch.cat([turned.real, turned.imag], -1)

    def mlp(self, layer: int, x: Tensor) -> Tensor:
        gate, up = self.project(layer, "mlp.gate_proj", x), self.project(layer, "mlp.up_proj", x)
        return self.project(layer, "mlp.down_proj", torch.nn.functional.silu(gate) * up)
