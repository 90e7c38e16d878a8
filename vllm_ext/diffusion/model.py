"""What vLLM's registry looks at to learn that a diffusion model generates text; it is never run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class DiffusionModel(nn.Module):
    """Says that it is a text-generation model. The worker runs `forebay.diffusion` instead: see `worker`."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        raise NotImplementedError("diffusion models run in forebay's own worker; leave --worker-cls out")

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Never called."""
        raise NotImplementedError

    def forward(self, input_ids: Tensor, positions: Tensor, **_: Any) -> Tensor:
        """Never called."""
        raise NotImplementedError

    def compute_logits(self, hidden_states: torch.Tensor) -> Tensor | None:
        """Never called."""
        raise NotImplementedError
