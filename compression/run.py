"""Compressing a model folder: layer by layer, in bounded memory, to be taken up again where it stopped."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from forebay.compression.backbone import Backbone
from forebay.compression.calibration import ROWS, LayerStatistics
from forebay.compression.checkpoint import NAMES, ParserConfig, to_tensors
from forebay.compression.errors import CompressionError, ModelError
from forebay.compression.layer import Options, extract, find_backbone, score, select
from forebay.compression.output import CheckpointWriter, copy_other_files, copy_weights, save_json, save_tensors
from forebay.compression.selection import target
from forebay.compression.source import ModelFolder, choose_layers
from forebay.compression.streaming import HiddenStates, LayerwiseModel
from forebay.compression.texts import pack, read_documents

STATE = "state.json"

Report = Callable[[str, int, int], None]
"""Told what is being done, and how many steps of how many are over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What `compress` is to do. The defaults are the paper's main setting, but for the text, which the user gives."""

    text: Path
    options: Options = field(default_factory=Options)
    layers: str = "default"
    sequences: int = 512
    length: int = 2048
    rows: int = ROWS
    batch: int = 4
    """Sequences that go through a layer at a time."""
    seed: int = 0
    device: str = "cpu"
    dtype: str = "float32"
    """What layers compute in during calibration; the weights keep their own type."""
    allow_unseen: bool = False

    def identity(self) -> dict[str, Any]:
        """All that changes the result."""
        found = dataclasses.asdict(self) | {"text": str(self.text)}
        return {key: value for key, value in found.items() if key not in ("batch", "device")}


def compress(source: Path, out: Path, settings: Settings, report: Report = lambda *_: None) -> ParserConfig:
    """Write the compressed form of a model folder to a new folder.

    What is done is kept in `OUT.partial`, and a second call with the same settings goes on there. `OUT` appears when
    all is done.

    Raises:
        CompressionError: one line with the reason and the fix.
    """
    if out.exists():
        raise CompressionError(f"{out} exists already; give another folder with --out, or remove it")
    job = _Job(ModelFolder(source), out.with_name(out.name + ".partial"), settings, report)
    job.open()
    for layer in range(job.next_layer, job.layers[-1] + 1):
        job.run_layer(layer)
    config = job.finish()
    job.work.rename(out)
    return config


class _Job:
    """One compression on its way."""

    def __init__(self, source: ModelFolder, work: Path, settings: Settings, report: Report) -> None:
        self.source, self.work, self.settings, self.report = source, work, settings, report
        self.layers = choose_layers(settings.layers, source)
        self.options = dataclasses.replace(settings.options, activation=_activation(source))
        self.model = LayerwiseModel(source, settings.device, getattr(torch, settings.dtype))
        self.next_layer = 0
        self.tokens = torch.empty(0, 0, dtype=torch.long)
        self._named: dict[int, dict[str, Any]] = {}

    def open(self) -> None:
        """Start afresh or go on."""
        identity = {"model": self.source.fingerprint(), "settings": self.settings.identity()}
        identity = json.loads(json.dumps(identity, default=str))
        self.tokens = self._tokens()
        state = self._read_state()
        if state and state["identity"] != identity:
            raise CompressionError(
                f"{self.work} is of another model or other settings; remove it to start afresh, or repeat its settings"
            )
        self.next_layer = state["next_layer"] if state else 0
        if not state:
            shutil.rmtree(self.work, ignore_errors=True)
            self.work.mkdir(parents=True)
            self._embed()
            self._save_state(identity)
        self._identity = identity

    def run_layer(self, layer: int) -> None:
        """Calibrate and compress one layer, or let the hidden states pass through it."""
        self.report(f"layer {layer}", layer, self.layers[-1] + 1)
        chosen = layer in self.layers
        statistics = None
        if chosen:
            count = self.source.family.expert_count(self.source.config)
            scoring = self.source.family.router_scoring(self.source.config)
            statistics = LayerStatistics(
                layer, count, capacity=self.settings.rows, seed=self.settings.seed, scoring=scoring
            )
        self._forward(layer, statistics)
        if statistics is not None:
            rows = statistics.rows(allow_unseen=self.settings.allow_unseen)
            self._compress(layer, rows, statistics.routing)
        self.next_layer = layer + 1
        self._save_state(self._identity)
        self._states(layer).path.unlink(missing_ok=True)

    def finish(self) -> ParserConfig:
        """Add everything that is not compressed, the index and the configuration."""
        self.report("copying the rest", self.layers[-1] + 1, self.layers[-1] + 1)
        writer = CheckpointWriter(self.work)
        replaced: set[str] = set()
        kept: dict[int, list[int]] = {}
        for layer in self.layers:
            replaced.update(self.source.expert_names(layer))
            kept[layer] = self._adopt(writer, layer)
        copy_weights(self.source, writer, replaced)
        config = self._config(kept)
        copy_other_files(self.source, self.work)
        writer.finish(self.source.config | {"quantization_config": config.model_dump(mode="json")})
        for path in (self.work / STATE, self._states(self.next_layer).path):
            path.unlink(missing_ok=True)
        return config

    # ---- parts of a layer ----

    def _forward(self, layer: int, statistics: LayerStatistics | None) -> None:
        before, after = self._states(layer), self._states(layer + 1)
        after.create()
        total, batch, last = len(self.tokens), self.settings.batch, self.layers[-1] + 1
        with torch.no_grad(), self.model.layer(layer) as module:
            for first in range(0, total, batch):
                states = before.read(first, min(batch, total - first))
                named = self._arguments(len(states))
                if statistics is None:
                    made = module(states.to(self.model.device), **named)
                else:
                    with statistics.watch(module):
                        made = module(states.to(self.model.device), **named)
                after.write(first, made[0] if isinstance(made, tuple) else made)
                self.report(f"layer {layer}: calibrating, {first + len(states)} of {total} sequences", layer, last)

    def _compress(self, layer: int, rows: list[Tensor], routing_E: Tensor) -> None:
        experts = self.source.read_experts(layer)
        of = f"layer {layer}: aligning {len(experts)} experts"
        total = self.layers[-1] + 1
        found = self._cached_backbone(layer) or find_backbone(
            experts, self.options, lambda round_, done: self.report(f"{of}, round {round_}, {done} done", layer, total)
        )
        self._cache_backbone(layer, found)
        self.report(f"layer {layer}: scoring", layer, total)
        kept = select(score(experts, found, rows, self.options, routing_E), self.options)
        made = extract(experts, found, kept)
        save_tensors(self._shard(layer), to_tensors(self.source.family.prefix(layer), made))
        self._backbone_file(layer).unlink(missing_ok=True)

    def _adopt(self, writer: CheckpointWriter, layer: int) -> list[int]:
        """Count a finished layer in; how many units each expert keeps."""
        path = self._shard(layer)
        prefix = self.source.family.prefix(layer)
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        writer.adopt(path.name, {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()})
        return [int(count) for count in tensors[f"{prefix}.{NAMES[-1]}"].diff()]

    # ---- files ----

    def _states(self, layer: int) -> HiddenStates:
        shape = (*self.tokens.shape, int(self.source.config["hidden_size"]))
        return HiddenStates(self.work / f"hidden-{layer:05d}.bin", shape, self.model.dtype)

    def _shard(self, layer: int) -> Path:
        return self.work / f"parser-layer-{layer:05d}.safetensors"

    def _backbone_file(self, layer: int) -> Path:
        return self.work / f"backbone-{layer:05d}.safetensors"

    def _cached_backbone(self, layer: int) -> Backbone | None:
        """What an interrupted run had aligned already: of this model, whose fingerprint the folder carries."""
        if not self._backbone_file(layer).exists():
            return None
        from safetensors.torch import load_file

        from forebay.compression.experts import Expert

        stored = load_file(self._backbone_file(layer))
        return Backbone(Expert(stored["gate"], stored["up"], stored["down"]), stored["transport"])

    def _cache_backbone(self, layer: int, found: Backbone) -> None:
        weights = found.weights
        parts = {"gate": weights.gate_HD, "up": weights.up_HD, "down": weights.down_DH, "transport": found.transport_EH}
        save_tensors(self._backbone_file(layer), parts)

    def _read_state(self) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = json.loads((self.work / STATE).read_text())
        except (OSError, ValueError):
            return None
        return found

    def _save_state(self, identity: dict[str, Any]) -> None:
        save_json(self.work / STATE, {"identity": identity, "next_layer": self.next_layer})

    # ---- beginnings ----

    def _tokens(self) -> Tensor:
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(self.source.path)
        except (OSError, ValueError) as error:
            raise ModelError(f"{self.source.path}: no tokenizer ({str(error).splitlines()[0]})") from None
        settings = self.settings
        return pack(
            read_documents(settings.text),
            lambda text: tokenizer.encode(text, add_special_tokens=False),
            tokenizer.eos_token_id,
            sequences=settings.sequences,
            length=settings.length,
            seed=settings.seed,
        )

    def _embed(self) -> None:
        states, batch = self._states(0), self.settings.batch
        states.create()
        for first in range(0, len(self.tokens), batch):
            hidden, named = self.model.embed(self.tokens[first : first + batch])
            self._named[len(hidden)] = named
            states.write(first, hidden)

    def _arguments(self, count: int) -> dict[str, Any]:
        """What the layers want beside the hidden states of so many sequences."""
        if count not in self._named:
            self._named[count] = self.model.embed(self.tokens[:count])[1]
        return self._named[count]

    def _config(self, kept: dict[int, list[int]]) -> ParserConfig:
        weights = self.source.expert_names(self.layers[0])
        experts = len(kept[self.layers[0]])
        down = self.source.size(weights[-1]) // (experts if len(weights) == 2 else 1)
        size = int(self.source.config["hidden_size"])
        texts = hashlib.sha256(self.tokens.numpy().tobytes()).hexdigest()[:16]
        made_with = dataclasses.asdict(self.options) | {"calibration_tokens": self.tokens.numel(), "calibration": texts}
        return ParserConfig(
            rho=self.options.rho, activation=self.options.activation, experts=experts, hidden_units=down // size,
            hidden_size=size, kept=kept, made_with=made_with,
        )  # fmt: skip


def _activation(source: ModelFolder) -> str:
    from forebay.compression.importance import ACTIVATIONS

    name = source.config.get("hidden_act", "silu")
    if name not in ACTIVATIONS:
        raise ModelError(f"hidden_act {name!r} is none of {', '.join(ACTIVATIONS)}")
    return str(name)


def estimate(source: Path, settings: Settings) -> dict[str, Any]:
    """What `compress` would make of a model, without calibration: the same units for every expert.

    Raises:
        CompressionError: the model cannot be compressed.
    """
    folder = ModelFolder(source)
    layers, rho = choose_layers(settings.layers, folder), settings.options.rho
    experts = folder.family.expert_count(folder.config)
    sizes = {layer: [folder.bytes(name) for name in folder.expert_names(layer)] for layer in layers}
    size = int(folder.config["hidden_size"])
    names = folder.expert_names(layers[0])
    units = folder.size(names[-1]) // (experts if len(names) == 2 else 1) // size
    kept = max(target(rho, experts * units), settings.options.min_units * experts)
    fraction = (kept / experts + units / experts) / units
    before = sum(folder.bytes(name) for name in folder.names)
    after = before - sum(sum(found) for found in sizes.values()) * (1 - fraction)
    each = {"kept": kept, "units": experts * units, "fewest": settings.options.min_units, "median": kept / experts}
    return {
        "model_type": folder.config["model_type"],
        "rho": rho,
        "bytes": round(after),
        "dense_bytes": before,
        "layers": [{"layer": layer, **each, "most": units, "fraction": fraction} for layer in layers],
    }
