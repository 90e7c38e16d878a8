"""The weights of a diffusion language model, as the forward pass takes them, read from a Hugging Face folder.

A process may hold a part of every layer only (tensor parallelism, as in Megatron-LM, arXiv 1909.08053).

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
    """((Q + 2 K) S, D): query, key, value. Of queries and keys, what RoPE turns together stands side by side."""
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


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of every layer that one process of a tensor-parallel group holds.

    Heads and the MLP's columns are dealt out; embedding, norms and the output layer are whole everywhere.
    """

    rank: int = 0
    size: int = 1

    def check(self, config: DiffusionConfig) -> None:
        """Whether a model can be dealt out.

        Raises:
            ModelError: it has numbers that the size does not divide.
        """
        counts = {"heads": config.heads, "key and value heads": config.kv_heads, "MLP columns": config.intermediate}
        for name, count in counts.items():
            if count % self.size:
                raise ModelError(f"tensor parallel size {self.size} does not divide the model's {count} {name}")

    def rows(self, weight: Tensor) -> Tensor:
        """Of a matrix whose outputs are dealt out, or of its bias."""
        return weight.chunk(self.size)[self.rank]

    def columns(self, weight: Tensor) -> Tensor:
        """Of a matrix whose inputs are dealt out: the results of all processes are to be summed."""
        return weight.chunk(self.size, 1)[self.rank].contiguous()


WHOLE = Shard()


def load(folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu", shard: Shard = WHOLE) -> ModelWeights:
    """Read a model, or the part of it that one process holds.

    Raises:
        ModelError: the folder is incomplete, damaged, or holds another kind of model, or cannot be dealt out so.
    """
    family, config = read_config(folder)
    shard.check(config)
    with ExitStack() as files:
        get = _reader(folder, files)

        def weight(name: str, part: str = "weight") -> Tensor:
            return get(f"{name}.{part}").to(device, dtype)

        embedding = weight(family.embedding)
        layers = [_layer(family, config, number, weight, shard) for number in range(config.layers)]
        output = embedding if config.tied else weight(family.output)
        return ModelWeights(config, embedding, layers, weight(family.norm), output)


def _layer(
    family: Family, config: DiffusionConfig, number: int, weight: Callable[..., Tensor], shard: Shard
) -> LayerWeights:
    names = {part: f"{family.layer.format(layer=number)}.{name}" for part, name in family.parts.items()}

    def rows(part: str, kind: str = "weight") -> Tensor:
        return shard.rows(weight(names[part], kind))

    def qkv(kind: str = "weight") -> Tensor:
        queries, keys = (pair_up(rows(part, kind), config.head_size) for part in ("query", "key"))
        return torch.cat([queries, keys, rows("value", kind)])

    return LayerWeights(
        attention_norm_D=weight(names["attention_norm"]),
        qkv=qkv(),
        qkv_bias=qkv("bias") if config.qkv_bias else None,
        attention_output=shard.columns(weight(names["attention_output"])),
        mlp_norm_D=weight(names["mlp_norm"]),
        gate_up=torch.cat([rows("gate"), rows("up")]),
        down_DI=shard.columns(weight(names["down"])),
    )


def pair_up(rows: Tensor, size: int) -> Tensor:
    """Rows of a query or key projection, or its bias, with those side by side that RoPE turns together.

    Hugging Face's models keep them half a head apart. No product of a query and a key changes.

    Args:
        rows: of all heads.
        size: of a head.
    """
    return rows.unflatten(0, (-1, 2, size // 2)).transpose(1, 2).flatten(0, 2)


def take_apart(rows: Tensor, size: int) -> Tensor:
    """What `pair_up` was given."""
    return rows.unflatten(0, (-1, size // 2, 2)).transpose(1, 2).flatten(0, 2)


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
