"""Backbones that were found before, on this machine, for the same experts.

Aligning takes most of a compression's time and depends on nothing but the experts' weights, so another rho, text or
output folder finds it done. The folder can be removed at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from forebay.compression.backbone import Backbone
from forebay.compression.experts import Expert
from forebay.compression.layer import Options
from forebay.compression.output import save_tensors

VERSION = 1
"""Of the alignment: another one may find other backbones."""


def default_folder() -> Path:
    """`~/.cache/forebay/backbones`, or where XDG_CACHE_HOME says."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "forebay" / "backbones"


class BackboneCache:
    """Backbones in a folder, by the content of the weights. A folder that cannot be written keeps nothing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def key(self, experts: Sequence[Expert], options: Options) -> str:
        """Of all weights and of the options that the backbone depends on."""
        digest = hashlib.sha256(f"{VERSION} {options.backbone} {options.max_rounds}".encode())
        for expert in experts:
            for part in (expert.gate_HD, expert.up_HD, expert.down_DH):
                digest.update(f"{part.dtype} {tuple(part.shape)}".encode())
                digest.update(memoryview(part.contiguous().view(torch.uint8).numpy()))
        return digest.hexdigest()

    def load(self, key: str) -> Backbone | None:
        """What was saved under a key, if it can be read."""
        try:
            found = load_file(self._path(key))
            return Backbone(Expert(found["gate"], found["up"], found["down"]), found["transport"].long())
        except (OSError, SafetensorError, KeyError):
            return None

    def save(self, key: str, found: Backbone) -> None:
        """Keep a backbone."""
        weights = found.weights
        parts = {"gate": weights.gate_HD, "up": weights.up_HD, "down": weights.down_DH}
        parts["transport"] = found.transport_EH.to(torch.int32)
        with contextlib.suppress(OSError, SafetensorError):
            self.folder.mkdir(parents=True, exist_ok=True)
            save_tensors(self._path(key), parts)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.safetensors"
