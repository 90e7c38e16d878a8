"""A model's forward pass with one decoder layer in memory at a time.

All sequences go through layer 0, then all through layer 1, and so on; in between their hidden states lie in a file. The
layers are transformers' own modules: they are built without weights, filled from the checkpoint, and emptied again.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from forebay.compression.errors import ModelError
from forebay.compression.source import ModelFolder


class _StopForwardError(Exception):
    """Ends a forward pass before its first layer."""


class LayerwiseModel:
    """The decoder layers of a model, to be loaded and run one after the other.

    Args:
        folder: the model.
        device: where layers run.
        dtype: what they compute in.

    Raises:
        ModelError: transformers has no such model, or its layers are not where decoders have them.
    """

    def __init__(self, folder: ModelFolder, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        self.folder, self.device, self.dtype = folder, torch.device(device), dtype
        try:
            config = AutoConfig.from_pretrained(folder.path)
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        except (ValueError, OSError, KeyError) as error:
            raise ModelError(
                f"{folder.path}: transformers cannot build this model ({str(error).splitlines()[0]})"
            ) from None
        self._model = model.eval()
        self._decoder = model.model
        for name in ("embed_tokens", "layers", "rotary_emb"):
            if not hasattr(self._decoder, name):
                raise ModelError(f"{type(model).__name__} has no model.{name}; it is no decoder that can be streamed")
        self._decoder.rotary_emb = type(self._decoder.rotary_emb)(config=config).to(self.device)

    def embed(self, tokens_BS: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """Embeddings of a batch (B, S, D), and what else its decoder layers are to be called with."""
        table = self.folder.get("model.embed_tokens.weight").to(self.device, self.dtype)
        self._decoder.embed_tokens.weight = nn.Parameter(table, requires_grad=False)
        found: dict[str, Any] = {}

        def catch(module: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Any]) -> None:
            found["hidden"] = inputs[0] if inputs else named.pop("hidden_states")
            found["named"] = named
            raise _StopForwardError

        hook = self._decoder.layers[0].register_forward_pre_hook(catch, with_kwargs=True)
        try:
            with torch.no_grad():
                self._model(tokens_BS.to(self.device), use_cache=False)
        except _StopForwardError:
            pass
        finally:
            hook.remove()
            self._decoder.embed_tokens.to("meta")
        return found["hidden"], found["named"]

    @contextmanager
    def layer(self, number: int) -> Iterator[nn.Module]:
        """One decoder layer with its weights, for as long as the context lasts."""
        empty = self._decoder.layers[number]
        module = copy.deepcopy(empty)
        self._fill(module, number)
        yield module

    def _fill(self, module: nn.Module, number: int) -> None:
        prefix = f"model.layers.{number}."
        stored = {self._module_name(name[len(prefix) :]): name for name in self.folder.names if name.startswith(prefix)}
        experts = [name for name, _ in module.named_parameters() if name.endswith("experts.gate_up_proj")]
        for name in [*dict(module.named_parameters()), *dict(module.named_buffers())]:
            if name in stored and not any(name.startswith(one.removesuffix("gate_up_proj")) for one in experts):
                self._set(module, name, self.folder.get(stored[name]))
        for name in experts:
            self._fill_experts(module, name.removesuffix(".gate_up_proj"), number)
        empty = [name for name, tensor in module.named_parameters() if tensor.is_meta]
        if empty:
            raise ModelError(f"{self.folder.path}: {prefix}{empty[0]} is not among the weights")

    def _module_name(self, name: str) -> str:
        for stored, module in self.folder.family.module_names.items():
            if name.startswith(stored):
                return module + name[len(stored) :]
        return name

    def _fill_experts(self, module: nn.Module, name: str, number: int) -> None:
        """Copy the experts one by one, so that they are in memory once."""
        home = module.get_submodule(name)
        shapes = {part: getattr(home, part).shape for part in ("gate_up_proj", "down_proj")}
        for part, shape in shapes.items():
            self._set(home, part, torch.empty(shape, dtype=self.dtype))
        units = shapes["down_proj"][-1]
        gate_up, down = home.gate_up_proj.data, home.down_proj.data
        for expert, weights in enumerate(self.folder.each_expert(number)):
            gate_up[expert, :units], gate_up[expert, units:] = weights.gate_HD, weights.up_HD
            down[expert] = weights.down_DH

    def _set(self, module: nn.Module, name: str, value: Tensor) -> None:
        home, _, leaf = name.rpartition(".")
        owner = module.get_submodule(home)
        value = value.to(self.device, self.dtype if value.dtype.is_floating_point else value.dtype)
        if leaf in owner._parameters:
            owner._parameters[leaf] = nn.Parameter(value, requires_grad=False)
        else:
            owner._buffers[leaf] = value


class HiddenStates:
    """Hidden states of all sequences in a file: (sequences, length, D)."""

    def __init__(self, path: Path, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
        self.path, self.shape, self.dtype = path, shape, dtype
        self._bytes = shape[1] * shape[2] * dtype.itemsize

    def create(self) -> None:
        """Make room for all of them."""
        with self.path.open("wb") as file:
            file.truncate(self.shape[0] * self._bytes)

    def read(self, first: int, count: int) -> Tensor:
        """Sequences `first` to `first + count`."""
        with self.path.open("rb") as file:
            file.seek(first * self._bytes)
            data = bytearray(file.read(count * self._bytes))
        return torch.frombuffer(data, dtype=self.dtype).view(-1, *self.shape[1:])

    def write(self, first: int, states_BSD: Tensor) -> None:
        """Put sequences from `first` on in place."""
        flat = states_BSD.detach().to("cpu", self.dtype).contiguous().view(torch.uint8)
        with self.path.open("r+b") as file:
            file.seek(first * self._bytes)
            file.write(flat.numpy().tobytes())
