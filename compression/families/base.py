"""What a model family is: how its configuration and its tensors are named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Names of one family of Mixture-of-Experts models, as its checkpoints and its `config.json` use them."""

    model_types: tuple[str, ...]
    """`model_type` in `config.json`."""
    experts: str = "model.layers.{layer}.mlp.experts"
    """Where the routed experts of a layer are."""
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Gate, up and down of one expert: `{experts}.{expert}.{part}.weight`."""
    counts: tuple[str, ...] = ("num_experts", "num_local_experts", "n_routed_experts")
    """Keys of the configuration that may hold the number of routed experts."""
    scoring: str = "softmax"
    """How the router turns logits into probabilities where the configuration has no `scoring_func`."""
    module_names: Mapping[str, str] = field(default_factory=dict)
    """Prefixes of tensor names inside a layer that its module in transformers calls differently."""
    last_layers: Mapping[int, int] = field(default_factory=dict)
    """The paper's choice: of a model with so many layers the last so many are compressed."""

    def prefix(self, layer: int) -> str:
        """Where the routed experts of this layer are."""
        return self.experts.format(layer=layer)

    def expert_tensor(self, layer: int, expert: int, part: int) -> str:
        """Name of one matrix of one expert: part 0 is gate, 1 up, 2 down."""
        return f"{self.prefix(layer)}.{expert}.{self.parts[part]}.weight"

    def fused_tensors(self, layer: int) -> tuple[str, str]:
        """Names where all experts of a layer are stored as one: gate and up (E, 2H, D), down (E, D, H)."""
        return f"{self.prefix(layer)}.gate_up_proj", f"{self.prefix(layer)}.down_proj"

    def expert_count(self, config: Mapping[str, Any]) -> int:
        """Routed experts of a layer; 0 when the configuration does not say."""
        return int(next((config[key] for key in self.counts if config.get(key)), 0))

    def router_scoring(self, config: Mapping[str, Any]) -> str:
        """`softmax` or `sigmoid`."""
        return str(config.get("scoring_func") or self.scoring)

    def default_layers(self, layers: int, moe_layers: list[int]) -> list[int]:
        """The paper's choice for its models, all MoE layers for others."""
        count = self.last_layers.get(layers)
        return moe_layers if count is None else moe_layers[-count:]
