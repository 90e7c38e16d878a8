"""Writing a checkpoint folder: shard by shard, and visible only when it is whole."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from forebay.compression.source import INDEX, ModelFolder

SHARD_BYTES = 1 << 30
"""Tensors are gathered up to this much before they are written (our choice: about one MoE layer)."""


def save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write one shard so that it is there whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    save_file(tensors, partial, metadata={"format": "pt"})
    mask = os.umask(0)
    os.umask(mask)
    partial.chmod(0o666 & ~mask)
    with partial.open("rb+") as file:
        os.fsync(file.fileno())
    partial.replace(path)


def save_json(path: Path, content: dict[str, Any]) -> None:
    """Write JSON so that it is there whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=2) + "\n")
    partial.replace(path)


class CheckpointWriter:
    """Collects tensors into shards in a folder, then writes their index.

    Args:
        folder: where to; it exists.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._shards: dict[str, str] = {}
        self._waiting: dict[str, Tensor] = {}
        self._bytes = self._total = self._count = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Put a tensor into the shard that is being gathered."""
        size = tensor.numel() * tensor.element_size()
        if self._waiting and self._bytes + size > SHARD_BYTES:
            self._flush()
        self._waiting[name] = tensor.contiguous()
        self._bytes += size
        self._total += size

    def adopt(self, shard: str, tensors: Mapping[str, int]) -> None:
        """Count in a shard that is there already, with its tensors' names and bytes."""
        for name, size in tensors.items():
            self._shards[name] = shard
            self._total += size

    def finish(self, config: dict[str, Any]) -> None:
        """Write what is left, the index and `config.json`."""
        self._flush()
        save_json(self.folder / INDEX, {"metadata": {"total_size": self._total}, "weight_map": self._shards})
        save_json(self.folder / "config.json", config)

    def _flush(self) -> None:
        if not self._waiting:
            return
        self._count += 1
        shard = f"model-{self._count:05d}.safetensors"
        save_tensors(self.folder / shard, self._waiting)
        self._shards.update(dict.fromkeys(self._waiting, shard))
        self._waiting, self._bytes = {}, 0


def copy_other_files(source: ModelFolder, target: Path) -> None:
    """Tokenizer, chat template, generation configuration and whatever else is beside the weights."""
    for path in source.other_files():
        shutil.copy2(path, target / path.name)


def copy_weights(source: ModelFolder, writer: CheckpointWriter, leave_out: set[str]) -> None:
    """All tensors but some, in the order of the source's shards."""
    for name in sorted(source.names - leave_out, key=lambda name: (source.shard_of[name], name)):
        writer.add(name, source.get(name))
