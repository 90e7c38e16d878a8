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
from forebay.compression.budget import Sizes, units_within
from forebay.compression.cache import BackboneCache, default_folder
from forebay.compression.calibration import ROWS, LayerStatistics
from forebay.compression.checkpoint import OFFSETS, ParserConfig, to_tensors
from forebay.compression.errors import CompressionError, ModelError
from forebay.compression.experts import Expert
from forebay.compression.layer import Options, as_stored, extract, find_backbone, score, select
from forebay.compression.output import CheckpointWriter, copy_other_files, copy_weights, save_tensors
from forebay.compression.selection import select_budget
from forebay.compression.source import ModelFolder, choose_layers
from forebay.compression.streaming import LayerwiseModel
from forebay.compression.texts import pack, read_documents
from forebay.compression.work import ScoredLayer, WorkFolder, return_memory

Report = Callable[[str, int, int], None]
"""Told what is being done, and how many steps of how many are over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What `compress` is to do. The defaults are the paper's main setting, but for the text, which the user gives."""

    text: Path
    options: Options = field(default_factory=Options)
    memory_budget: int | None = None
    """Bytes for all weights, instead of `options.rho`: the units of all layers compete for them (ours)."""
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
    cache: Path = field(default_factory=default_folder)
    """Where backbones are kept: see `cache.py`."""

    def identity(self) -> dict[str, Any]:
        """All that changes the result."""
        found = dataclasses.asdict(self) | {"text": str(self.text)}
        return {key: value for key, value in found.items() if key not in ("batch", "device", "cache")}


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
    if job.units is not None:
        job.share(job.units)
    config = job.finish()
    job.work.path.rename(out)
    return config


class _Job:
    """One compression on its way."""

    def __init__(self, source: ModelFolder, work: Path, settings: Settings, report: Report) -> None:
        self.source, self.settings, self.report = source, settings, report
        self.layers = choose_layers(settings.layers, source)
        self.options = dataclasses.replace(settings.options, activation=_activation(source))
        self.units = _units(source, self.layers, settings)
        self.model = LayerwiseModel(source, settings.device, getattr(torch, settings.dtype))
        self.cache = BackboneCache(settings.cache)
        self.next_layer = 0
        self.tokens = self._tokens()
        self.work = WorkFolder(work, (*self.tokens.shape, int(source.config["hidden_size"])), self.model.dtype)
        self._named: dict[int, dict[str, Any]] = {}

    def open(self) -> None:
        """Start afresh or go on."""
        identity = {"model": self.source.fingerprint(), "settings": self.settings.identity()}
        identity = json.loads(json.dumps(identity, default=str))
        state = self.work.read_state()
        if state and state["identity"] != identity:
            raise CompressionError(
                f"{self.work.path} is of another model or other settings; remove it to start afresh, or repeat its "
                "settings"
            )
        self.next_layer = state["next_layer"] if state else 0
        if not state:
            shutil.rmtree(self.work.path, ignore_errors=True)
            self.work.path.mkdir(parents=True)
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
        return_memory()
        if statistics is not None:
            rows = statistics.rows(allow_unseen=self.settings.allow_unseen)
            self._compress(layer, rows, statistics.routing)
            return_memory()
        self.next_layer = layer + 1
        self._save_state(self._identity)
        self.work.states(layer).path.unlink(missing_ok=True)

    def share(self, units: int) -> None:
        """Let the units of all layers compete, and compress the layers."""
        self.report("choosing units", self.layers[-1] + 1, self.layers[-1] + 1)
        scores = [self.work.load_scores(layer) for layer in self.layers]
        for layer, kept in zip(self.layers, select_budget(scores, units, self.options.min_units), strict=True):
            if not self.work.shard(layer).exists():
                self._extract(layer, self.source.read_experts(layer), self.work.load_scored(layer), kept)

    def finish(self) -> ParserConfig:
        """Add everything that is not compressed, the index and the configuration."""
        self.report("copying the rest", self.layers[-1] + 1, self.layers[-1] + 1)
        writer = CheckpointWriter(self.work.path)
        replaced: set[str] = set()
        kept: dict[int, list[int]] = {}
        for layer in self.layers:
            replaced.update(self.source.expert_names(layer))
            kept[layer] = self._adopt(writer, layer)
        copy_weights(self.source, writer, replaced)
        config = self._config(kept)
        copy_other_files(self.source, self.work.path)
        writer.finish(self.source.config | {"quantization_config": config.model_dump(mode="json")})
        self.work.clear()
        return config

    # ---- parts of a layer ----

    def _forward(self, layer: int, statistics: LayerStatistics | None) -> None:
        before, after = self.work.states(layer), self.work.states(layer + 1)
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
        """With a budget for all layers, only up to the scores."""
        experts, total = self.source.read_experts(layer), self.layers[-1] + 1
        found = self._backbone(layer, experts)
        self.report(f"layer {layer}: scoring", layer, total)
        scores = score(experts, as_stored(found, self.options), rows, self.options, routing_E)
        scored = ScoredLayer(found, scores, rows if self.options.refit else [])
        if self.units is None:
            self._extract(layer, experts, scored, select(scores, self.options))
        else:
            self.work.save_scored(layer, scored)

    def _backbone(self, layer: int, experts: list[Expert]) -> Backbone:
        """Found before, or now."""
        key = self.cache.key(experts, self.options)
        found = self.cache.load(key)
        if found is None:
            of, total = f"layer {layer}: aligning {len(experts)} experts", self.layers[-1] + 1
            found = find_backbone(
                experts,
                self.options,
                lambda round_, done: self.report(f"{of}, round {round_}, {done} done", layer, total),
            )
            self.cache.save(key, found)
        return found

    def _extract(self, layer: int, experts: list[Expert], scored: ScoredLayer, kept: list[Tensor]) -> None:
        rows = scored.rows if self.options.refit else None
        made = extract(experts, as_stored(scored.backbone, self.options), kept, rows, self.options.activation)
        save_tensors(self.work.shard(layer), to_tensors(self.source.family.prefix(layer), made))

    def _adopt(self, writer: CheckpointWriter, layer: int) -> list[int]:
        """Count a finished layer in; how many units each expert keeps."""
        path = self.work.shard(layer)
        prefix = self.source.family.prefix(layer)
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        writer.adopt(path.name, {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()})
        return [int(count) for count in tensors[f"{prefix}.{OFFSETS}"].diff()]

    # ---- beginnings ----

    def _save_state(self, identity: dict[str, Any]) -> None:
        self.work.save_state({"identity": identity, "next_layer": self.next_layer})

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
        states, batch = self.work.states(0), self.settings.batch
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
        sizes = Sizes.of(self.source, self.layers, self.options)
        texts = hashlib.sha256(self.tokens.numpy().tobytes()).hexdigest()[:16]
        made_with = dataclasses.asdict(self.options) | {"calibration_tokens": self.tokens.numel(), "calibration": texts}
        rho = self.options.rho
        if self.settings.memory_budget is not None:
            rho = 1 - sum(map(sum, kept.values())) / (sizes.layers * sizes.experts * sizes.units)
            made_with |= {"rho": rho, "memory_budget": self.settings.memory_budget}
        return ParserConfig(
            rho=rho, activation=self.options.activation, experts=sizes.experts, hidden_units=sizes.units,
            hidden_size=int(self.source.config["hidden_size"]), kept=kept, made_with=made_with,
            backbone_dtype="int8" if self.options.backbone_dtype == "int8" else None,
        )  # fmt: skip


def _units(source: ModelFolder, layers: list[int], settings: Settings) -> int | None:
    """Units for all layers together, where they share a budget."""
    if settings.memory_budget is None:
        return None
    if settings.options.scope == "expert":
        raise CompressionError(
            "--scope expert gives every expert the same share, --memory-budget the best ones; leave one of them out"
        )
    return units_within(Sizes.of(source, layers, settings.options), settings.memory_budget)


def _activation(source: ModelFolder) -> str:
    from forebay.compression.importance import ACTIVATIONS

    name = source.config.get("hidden_act", "silu")
    if name not in ACTIVATIONS:
        raise ModelError(f"hidden_act {name!r} is none of {', '.join(ACTIVATIONS)}")
    return str(name)
