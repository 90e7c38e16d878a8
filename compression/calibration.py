"""What reaches the routed experts of a layer: a sample of rows for each, and how the router spreads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from forebay.compression.errors import CalibrationError, ModelError
from forebay.compression.reservoir import Reservoir

ROWS = 2048
"""Rows kept for each expert (the paper's setting)."""


class LayerStatistics:
    """Collects them while the layer runs: see `watch`.

    Args:
        layer: number, for messages and seeds.
        experts: routed experts.
        capacity: rows to keep for each.
        seed: of the sampling.
        scoring: `softmax` or `sigmoid`, how the router turns logits into probabilities.
    """

    def __init__(
        self, layer: int, experts: int, *, capacity: int = ROWS, seed: int = 0, scoring: str = "softmax"
    ) -> None:
        self.layer = layer
        self.reservoirs = [Reservoir(capacity, seed * 1_000_003 + layer * 1009 + expert) for expert in range(experts)]
        self._squares_E = torch.zeros(experts, dtype=torch.float64)
        self._tokens = 0
        self._probabilities: Callable[[Tensor], Tensor] = (
            torch.sigmoid if scoring == "sigmoid" else lambda logits: logits.softmax(-1)
        )

    @contextmanager
    def watch(self, module: nn.Module) -> Iterator[None]:
        """Look on while a decoder layer of transformers runs.

        Raises:
            ModelError: it has no module `experts` with fused weights, or no `gate` beside it.
        """
        name = next((name for name, _ in module.named_modules() if name.split(".")[-1] == "experts"), None)
        home = module.get_submodule(name.rpartition(".")[0]) if name else None
        if home is None or not hasattr(home, "gate") or not hasattr(home.experts, "gate_up_proj"):
            raise ModelError(
                f"layer {self.layer}: looked for a router `gate` and fused `experts`, found {type(module)}"
            )
        hooks = [
            home.experts.register_forward_pre_hook(self._see_experts, with_kwargs=True),
            home.gate.register_forward_pre_hook(self._see_router),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @property
    def routing(self) -> Tensor:
        """Mean over all tokens of the square of each expert's router probability: (E,), float32."""
        return (self._squares_E / max(self._tokens, 1)).float()

    def rows(self, *, allow_unseen: bool = False) -> list[Tensor]:
        """The rows of every expert, (N, D) each.

        Args:
            allow_unseen: give an expert that no token reached one row of zeros, so that it falls back to the backbone
                but for its floor of units.

        Raises:
            CalibrationError: no token reached some experts.
        """
        unseen = [expert for expert, one in enumerate(self.reservoirs) if not one.seen]
        if unseen and not allow_unseen:
            raise CalibrationError(
                f"layer {self.layer}: no calibration token reached experts {', '.join(map(str, unseen))} of "
                f"{len(self.reservoirs)}; give more text, or go on with --allow-unseen"
            )
        width = next((one.rows().shape[1] for one in self.reservoirs if one.seen), 0)
        return [one.rows() if one.seen else torch.zeros(1, width) for one in self.reservoirs]

    def _see_experts(self, module: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Any]) -> None:
        rows, ids = _argument(inputs, named, 0, "hidden_states"), _argument(inputs, named, 1, "top_k_index")
        rows = rows.reshape(-1, rows.shape[-1])
        order = ids.reshape(-1).argsort(stable=True)
        tokens = order // ids.shape[-1]
        counts = ids.reshape(-1).bincount(minlength=len(self.reservoirs)).tolist()
        for reservoir, mine in zip(self.reservoirs, tokens.split(counts), strict=True):
            reservoir.offer(rows[mine])

    def _see_router(self, gate: nn.Module, inputs: Sequence[Tensor]) -> None:
        rows = inputs[0].reshape(-1, inputs[0].shape[-1])
        weight = gate.weight
        assert isinstance(weight, Tensor)
        chances = self._probabilities(nn.functional.linear(rows.float(), weight.float()))
        self._squares_E += chances.double().square().sum(0).cpu()
        self._tokens += len(rows)


def _argument(inputs: tuple[Tensor, ...], named: dict[str, Any], place: int, name: str) -> Tensor:
    found: Tensor = inputs[place] if place < len(inputs) else named[name]
    return found
