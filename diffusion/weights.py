"""The weights of a diffusion language model, as the forward pass takes them, read from a Hugging Face folder.

Shape letters: V vocabulary, D model dimension, I intermediate size, Q query heads, K key and value heads, S head size.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from forebay.diffusion.config import DiffusionConfig
from forebay.diffusion.errors import ModelError
from forebay.diffusion.families import Family, find_family

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
Get = Callable[[str], Tensor]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer; what is applied to the same input is one matrix."""

    attention_norm_D: Tensor
    qkv: Tensor
    """((Q + 2 K) S, D): query, key, value."""
    qkv_bias: Tensor | None
    attention_output: Tensor
    """(D, Q S)."""
    mlp_norm_D: Tensor
    gate_up: Tensor
    """(2 I, D)."""
    down_DI: Tensor


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All of a model."""

    config: DiffusionConfig
    embedding_VD: Tensor
    layers: list[LayerWeights]
    norm_D: Tensor
    output_VD: Tensor


def read_config(folder: Path) -> tuple[Family, DiffusionConfig]:
    """The family of a model folder and its configuration.

    Raises:
        ModelError: it is none that can be run.
    """
    path = folder / "config.json"
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}; give a Hugging Face model folder") from None
    except ValueError as error:
        raise ModelError(f"{path} is no JSON ({error}); copy it again") from None
    family = find_family(found)
    try:
        return family, family.read(found)
    except KeyError as error:
        raise ModelError(f"{path} has no {error.args[0]}, which a {family.name} diffusion model needs") from None


def load(folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> ModelWeights:
    """Read a model.

    Raises:
        ModelError: the folder is incomplete, damaged, or holds another kind of model.
    """
    family, config = read_config(folder)
    with ExitStack() as files:
        get = _reader(folder, files)

        def weight(name: str, part: str = "weight") -> Tensor:
            return get(f"{name}.{part}").to(device, dtype)

        embedding = weight(family.embedding)
        layers = [_layer(family, config, number, weight) for number in range(config.layers)]
        output = embedding if config.tied else weight(family.output)
        return ModelWeights(config, embedding, layers, weight(family.norm), output)


def _layer(family: Family, config: DiffusionConfig, number: int, weight: Callable[..., Tensor]) -> LayerWeights:
    names = {part: f"{family.layer.format(layer=number)}.{name}" for part, name in family.parts.items()}
    qkv = [names[part] for part in ("query", "key", "value")]
    return LayerWeights(
        attention_norm_D=weight(names["attention_norm"]),
        qkv=torch.cat([weight(name) for name in qkv]),
        qkv_bias=torch.cat([weight(name, "bias") for name in qkv]) if config.qkv_bias else None,
        attention_output=weight(names["attention_output"]),
        mlp_norm_D=weight(names["mlp_norm"]),
        gate_up=torch.cat([weight(names["gate"]), weight(names["up"])]),
        down_DI=weight(names["down"]),
    )


def _reader(folder: Path, files: ExitStack) -> Get:
    """Reads tensors by name; files stay open until the stack is closed."""
    opened: dict[str, Any] = {}
    shards = _shards(folder)

    def get(name: str) -> Tensor:
        shard = shards.get(name, SINGLE) if shards else SINGLE
        try:
            if shard not in opened:
                opened[shard] = files.enter_context(safe_open(folder / shard, "pt"))
            tensor: Tensor = opened[shard].get_tensor(name)
        except FileNotFoundError:
            raise ModelError(f"{folder / shard} is missing; copy the model again") from None
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{folder / shard}: {name} cannot be read ({error}); copy it again") from None
        return tensor

    return get


def _shards(folder: Path) -> dict[str, str]:
    """Tensor -> file, of a model in several files; empty for one in a single file."""
    if not (folder / INDEX).exists():
        return {}
    try:
        found: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    except (ValueError, KeyError) as error:
        raise ModelError(f"{folder / INDEX} cannot be read ({error}); copy it again") from None
    return found
