"""What the published implementation of PARSER returned on two tiny models: see the folder's own README."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from forebay.compression.experts import Expert
from forebay.compression.layer import Options

FOLDER = Path(__file__).parents[2] / "tests/assets/parser_reference"
MODELS = ("qwen2moe_tiny", "deepseekv2_tiny")
IMPORTANCE = {"formula": "output", "wanda": "wanda"}
SCOPE = {"parser-l-sp": "layer", "parser-e-sp": "expert"}


@dataclass(frozen=True)
class Reference:
    """One model's inputs and results."""

    name: str

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        """A file of tensors."""
        return _load(FOLDER / self.name / f"{name}.safetensors")

    def json(self, name: str) -> Any:
        """A file of JSON."""
        return json.loads((FOLDER / self.name / f"{name}.json").read_text())

    @property
    def layers(self) -> list[int]:
        """Its MoE layers."""
        return sorted({int(name.split(".")[2]) for name in self.tensors("model") if ".mlp.experts." in name})

    def experts(self, layer: int, dtype: torch.dtype = torch.float32) -> list[Expert]:
        """Routed experts of a layer."""
        weights = self.tensors("model")
        prefix = f"model.layers.{layer}.mlp.experts"
        count = len({name.split(".")[5] for name in weights if name.startswith(prefix + ".")})
        names = ("gate_proj", "up_proj", "down_proj")
        return [Expert(*(weights[f"{prefix}.{e}.{name}.weight"].to(dtype) for name in names)) for e in range(count)]

    def rows(self, layer: int) -> list[torch.Tensor]:
        """Calibration rows of every expert of a layer."""
        stored = self.tensors("calibration")
        return [stored[f"layer{layer}.expert{e}.x"].float() for e in range(len(self.experts(layer)))]

    def routing(self, layer: int) -> torch.Tensor:
        """Mean squared router probability of every expert of a layer."""
        found = self.json("calibration")
        experts = [self._statistics(found, layer, e) for e in range(len(self.experts(layer)))]
        return torch.tensor([one["routing_softmax_sq_sum"] / one["routing_total_tokens"] for one in experts])

    @staticmethod
    def _statistics(found: Any, layer: int, expert: int) -> Any:
        return next(
            part[key] for part in (found, *found.values()) if isinstance(part, dict)
            for key in part if key.startswith(f"{layer}/") and key.endswith(f"/{expert}")
        )  # fmt: skip


def options(name: str, rho: float) -> Options:
    """The settings that the fixtures' name of an option stands for."""
    backbone, importance, routing, method = name.split(".")
    chosen: Any = {
        "backbone": backbone,
        "importance": IMPORTANCE[importance],
        "scope": SCOPE[method],
        "routing_weight": routing == "route_on",
    }
    return Options(rho=rho, **chosen)


@functools.cache
def _load(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path)
