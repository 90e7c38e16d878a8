"""The folder of a compression that is not finished: what is done, and what waits for the rest."""

from __future__ import annotations

import ctypes
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from forebay.compression.backbone import Backbone
from forebay.compression.experts import Expert
from forebay.compression.output import save_json, save_tensors
from forebay.compression.streaming import HiddenStates

STATE = "state.json"


@dataclass(frozen=True, slots=True)
class ScoredLayer:
    """A layer whose units have scores, but which of them are kept is not known yet."""

    backbone: Backbone
    scores: list[Tensor]
    """Of each expert, (H,)."""
    rows: list[Tensor]
    """Calibration rows of each expert, (N, D); empty where nothing will need them."""


def return_memory() -> None:
    """Give what was freed back to the system: glibc keeps many small pieces, as much as a layer's weights."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


class WorkFolder:
    """Files of one compression on its way.

    Args:
        path: the folder; need not exist.
        shape: of the hidden states: sequences, length, D.
        dtype: of the hidden states.
    """

    def __init__(self, path: Path, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
        self.path = path
        self._shape, self._dtype = shape, dtype

    def read_state(self) -> dict[str, Any] | None:
        """What `save_state` wrote, if it did."""
        try:
            found: dict[str, Any] = json.loads((self.path / STATE).read_text())
        except (OSError, ValueError):
            return None
        return found

    def save_state(self, state: dict[str, Any]) -> None:
        """Remember how far the work is."""
        save_json(self.path / STATE, state)

    def states(self, layer: int) -> HiddenStates:
        """Hidden states that go into a layer."""
        return HiddenStates(self.path / f"hidden-{layer:05d}.bin", self._shape, self._dtype)

    def shard(self, layer: int) -> Path:
        """Where a compressed layer is."""
        return self.path / f"parser-layer-{layer:05d}.safetensors"

    def save_scored(self, layer: int, scored: ScoredLayer) -> None:
        """Put a scored layer aside."""
        weights, transport = scored.backbone.weights, scored.backbone.transport_EH
        parts = {"gate": weights.gate_HD, "up": weights.up_HD, "down": weights.down_DH, "transport": transport}
        parts["scores"] = torch.stack(scored.scores)
        parts |= {f"rows.{expert}": rows for expert, rows in enumerate(scored.rows)}
        save_tensors(self._scored(layer), {name: part.contiguous() for name, part in parts.items()})

    def load_scores(self, layer: int) -> list[Tensor]:
        """Only the scores of such a layer: its rows may be a thousand times as much."""
        with safe_open(self._scored(layer), "pt") as file:
            return list(file.get_tensor("scores"))

    def load_scored(self, layer: int) -> ScoredLayer:
        """A layer that was put aside."""
        parts = load_file(self._scored(layer))
        backbone = Backbone(Expert(parts["gate"], parts["up"], parts["down"]), parts["transport"])
        scores = list(parts["scores"])
        rows = [parts[f"rows.{expert}"] for expert in range(len(scores)) if f"rows.{expert}" in parts]
        return ScoredLayer(backbone, scores, rows)

    def clear(self) -> None:
        """Remove everything that is no part of the result."""
        for pattern in (STATE, "hidden-*.bin", "scored-*.safetensors"):
            for path in self.path.glob(pattern):
                path.unlink()

    def _scored(self, layer: int) -> Path:
        return self.path / f"scored-{layer:05d}.safetensors"
