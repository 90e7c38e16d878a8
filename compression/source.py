"""A model folder on disk, read tensor by tensor."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from forebay.compression.errors import CheckpointError, ModelError
from forebay.compression.experts import Expert
from forebay.compression.families import Family, find_family

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class ModelFolder:
    """A Hugging Face folder with safetensors weights. Nothing of them is in memory until it is asked for.

    Raises:
        ModelError: the folder, its configuration or its weights are missing or unreadable.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = _read_json(path / "config.json")
        if not isinstance(self.config.get("model_type"), str):
            raise ModelError(f"{path / 'config.json'} has no model_type; give a Hugging Face model folder")
        self.shard_of = _find_shards(path)
        """Name of a tensor -> file that holds it."""

    @cached_property
    def family(self) -> Family:
        """How its tensors are named.

        Raises:
            ModelError: the family is unknown.
        """
        return find_family(self.config["model_type"])

    @cached_property
    def names(self) -> set[str]:
        """All tensors."""
        return set(self.shard_of)

    @property
    def layers(self) -> int:
        """Decoder layers."""
        return int(self.config["num_hidden_layers"])

    def get(self, name: str) -> Tensor:
        """One tensor, read from disk.

        Raises:
            CheckpointError: it is not there, or its file is damaged.
        """
        shard = self.shard_of.get(name)
        if shard is None:
            raise CheckpointError(f"{self.path}: tensor {name} is missing")
        try:
            with safe_open(self.path / shard, "pt") as file:
                tensor: Tensor = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.path / shard} cannot be read ({error}); copy it again") from None
        return tensor

    def size(self, name: str) -> int:
        """Elements of a tensor, without reading it."""
        with safe_open(self.path / self.shard_of[name], "pt") as file:
            total = 1
            for length in file.get_slice(name).get_shape():
                total *= length
        return total

    def width(self, name: str) -> int:
        """Bytes of an element of a tensor."""
        with safe_open(self.path / self.shard_of[name], "pt") as file:
            kind = file.get_slice(name).get_dtype()
        return int("".join(filter(str.isdigit, kind.split("_")[0])) or 8) // 8

    def bytes(self, name: str) -> int:
        """Bytes of a tensor."""
        return self.size(name) * self.width(name)

    def expert_names(self, layer: int) -> list[str]:
        """Tensors of the routed experts of a layer, fused or one by one; none for a dense layer."""
        fused = [name for name in self.family.fused_tensors(layer) if name in self.names]
        if len(fused) == 2:
            return fused
        experts = range(self.family.expert_count(self.config))
        found = [self.family.expert_tensor(layer, expert, part) for expert in experts for part in range(3)]
        return found if found and found[0] in self.names else []

    def moe_layers(self) -> list[int]:
        """Layers with routed experts.

        Raises:
            ModelError: there is none: it says what was looked for.
        """
        found = [layer for layer in range(self.layers) if self.expert_names(layer)]
        if not found:
            wanted = [self.family.expert_tensor(0, 0, 0), *self.family.fused_tensors(0)]
            raise ModelError(f"{self.path} has no routed experts; looked for {', '.join(wanted)} and later layers")
        return found

    def each_expert(self, layer: int) -> Iterator[Expert]:
        """The routed experts of a layer, one after the other."""
        names = self.expert_names(layer)
        if len(names) == 2:
            gate_up, down = self.get(names[0]), self.get(names[1])
            units = gate_up.shape[1] // 2
            for one, two in zip(gate_up, down, strict=True):
                yield Expert(one[:units], one[units:], two)
            return
        for first in range(0, len(names), 3):
            yield Expert(*(self.get(name) for name in names[first : first + 3]))

    def read_experts(self, layer: int) -> list[Expert]:
        """All routed experts of a layer."""
        return list(self.each_expert(layer))

    def fingerprint(self) -> str:
        """Changes whenever a weight may have: of the configuration and every file's header, size and time."""
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for shard in sorted(set(self.shard_of.values())):
            status = (self.path / shard).stat()
            digest.update(f"{shard} {status.st_size} {status.st_mtime_ns}".encode())
        return digest.hexdigest()

    def other_files(self) -> Iterator[Path]:
        """Everything in the folder but its weights, their index and the configuration."""
        weights = {*self.shard_of.values(), INDEX, "config.json"}
        return (path for path in sorted(self.path.iterdir()) if path.is_file() and path.name not in weights)


def choose_layers(text: str, folder: ModelFolder) -> list[int]:
    """Layers that the user asks for: `default`, `all`, `last:N`, or a list such as `3,5,8-11`.

    Raises:
        ModelError: it names a layer without routed experts, or cannot be read.
    """
    moe = folder.moe_layers()
    if text == "default":
        return folder.family.default_layers(folder.layers, moe)
    if text == "all":
        return moe
    try:
        chosen = moe[-int(text[5:]) :] if text.startswith("last:") else sorted(set(_parse_list(text)))
    except ValueError:
        raise ModelError(f"--layers {text!r} is not default, all, last:N or a list such as 3,5,8-11") from None
    if wrong := [layer for layer in chosen if layer not in moe]:
        raise ModelError(f"--layers {text}: layer {wrong[0]} has no routed experts; those that have: {_ranges(moe)}")
    return chosen


def _parse_list(text: str) -> Iterator[int]:
    for part in text.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def _ranges(numbers: Iterable[int]) -> str:
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in found)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}; give a Hugging Face model folder") from None
    except ValueError as error:
        raise ModelError(f"{path} is no JSON ({error}); copy it again") from None
    if not isinstance(found, dict):
        raise ModelError(f"{path} is no JSON object; copy it again")
    return found


def _find_shards(path: Path) -> dict[str, str]:
    if (path / INDEX).exists():
        shards: dict[str, str] = _read_json(path / INDEX).get("weight_map", {})
        missing = sorted({shard for shard in shards.values() if not (path / shard).exists()})
        if missing:
            raise ModelError(f"{path / missing[0]} is missing, though {INDEX} names it; copy it again")
        return shards
    if not (path / SINGLE).exists():
        raise ModelError(f"{path} has neither {SINGLE} nor {INDEX}; other formats of weights are not read")
    try:
        with safe_open(path / SINGLE, "pt") as file:
            return dict.fromkeys(file.keys(), SINGLE)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path / SINGLE} cannot be read ({error}); copy it again") from None
