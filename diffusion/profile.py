"""Making a depth table for a model from text (BiCache, arXiv 2606.07571, its offline profiling).

Each sequence is passed whole, and each of its prefixes alone; no masks follow, as published. What a layer's keys and
values have in common is averaged over the samples of a share. The published profiler takes 500 chats for every per
cent; windows of plain text do as well here, and one whole pass serves all shares of its sequence.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from forebay.diffusion.attention import KeyValues
from forebay.diffusion.depth import Similarity, compare, make_table
from forebay.diffusion.depth_file import TAU, DepthFile, Measured, Model, Sampling, replace
from forebay.diffusion.errors import DiffusionError
from forebay.diffusion.fingerprint import fingerprint
from forebay.diffusion.texts import Sample, draw_samples, read_texts
from forebay.diffusion.tokenizer import read_encoder, read_template
from forebay.diffusion.transformer import Rows, Transformer
from forebay.diffusion.weights import load, read_config

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SAVE_EVERY = 10.0
"""Seconds between two savings of what is done."""

Tell = Callable[[int, int], None]
"""Tokens passed, and tokens in all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileSettings:
    """What is measured.

    Raises:
        DiffusionError: a value is out of its range.
    """

    text: Path
    """A file or a folder."""
    samples: int = 32
    """For each share (published: 500)."""
    shares: tuple[int, ...] = tuple(range(5, 100, 5))
    """Per cent of a sequence that is prefix (published: every one)."""
    length: int = 512
    """Tokens of a window of a document. Chats are taken whole."""
    seed: int = 0
    dtype: str = "float32"
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise DiffusionError(f"--samples {self.samples}: give at least 1")
        if self.length < 100:
            raise DiffusionError(f"--length {self.length}: give at least 100, a token for each per cent")
        if not self.shares or list(self.shares) != sorted({*self.shares} & {*range(1, 100)}):
            given = ",".join(map(str, self.shares))
            raise DiffusionError(f"--shares {given}: give rising per cents from 1 to 99")
        if self.dtype not in DTYPES:
            raise DiffusionError(f"--dtype {self.dtype!r} is not {' or '.join(DTYPES)}")


def parse_shares(text: str) -> tuple[int, ...]:
    """`20,40,60` or `FIRST-LAST:STEP`, or both.

    Raises:
        DiffusionError: it is neither.
    """
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+)(?::([1-9]\d*))?)?", part.strip())
        if not match:
            raise DiffusionError(f"--shares {text!r}: write for example 20,40,60 or 5-95:5")
        first, last, step = match.groups()
        found += range(int(first), int(last or first) + 1, int(step or 1))
    return tuple(found)


class Profiler:
    """One run over a model and a text.

    Args:
        folder: of the model.
        settings: what is measured.

    Raises:
        DiffusionError: the model or the text cannot be read, or they do not fit together.
    """

    def __init__(self, folder: Path, settings: ProfileSettings) -> None:
        _, config = read_config(folder)
        if settings.length > config.positions:
            raise DiffusionError(f"--length {settings.length}: the model has {config.positions} positions; give fewer")
        self.folder, self.settings = folder, settings
        self.model = Model(name=folder.absolute().name, fingerprint=fingerprint(folder), layers=config.layers)
        self.samples = draw_samples(
            read_texts(settings.text), read_encoder(folder), read_template(folder), settings.shares,
            samples=settings.samples, length=settings.length, limit=config.positions, seed=settings.seed,
        )  # fmt: skip
        self._sums = _Sums(config.layers)

    @property
    def passes(self) -> int:
        """Of the whole run."""
        return sum(1 + len(one.prefixes) for one in self.samples)

    @property
    def tokens(self) -> int:
        """In all passes."""
        return sum(map(_tokens, self.samples))

    def estimate(self) -> float:
        """Seconds that the run would take, by the time of one sample."""
        transformer = self._load()
        _measure(transformer, self.samples[0])  # whatever is slow once
        start = time.perf_counter()
        _measure(transformer, self.samples[0])
        return (time.perf_counter() - start) * self.tokens / _tokens(self.samples[0])

    def run(self, progress: Path, tell: Tell = lambda done, total: None) -> list[Measured]:
        """Similarities at every share that has samples.

        Args:
            progress: a file for what is done, removed at the end. A run that finds it goes on from there.
            tell: called after every sample.

        Raises:
            DiffusionError: the file belongs to another run, or cannot be written.
        """
        done = self._resume(progress)
        self._save(progress, done)  # before the work, as it may be impossible
        transformer, saved, total = self._load(), time.monotonic(), self.tokens
        passed = sum(map(_tokens, self.samples[:done]))
        try:
            for sample in self.samples[done:]:
                self._sums.add(_measure(transformer, sample))
                done, passed = done + 1, passed + _tokens(sample)
                tell(passed, total)
                if time.monotonic() - saved > SAVE_EVERY:
                    self._save(progress, done)
                    saved = time.monotonic()
        except BaseException:
            self._save(progress, done)
            raise
        progress.unlink(missing_ok=True)
        return self._sums.means()

    def file(self, found: Sequence[Measured], tau: float = TAU, worst_tau: float | None = None) -> DepthFile:
        """The file of what `run` found."""
        settings = self.settings
        sampling = Sampling(
            text=settings.text.absolute().name, samples=settings.samples, length=settings.length, seed=settings.seed,
            dtype=settings.dtype,
        )  # fmt: skip
        empty = DepthFile(model=self.model, leading={}, sampling=sampling, similarities=list(found))
        return apply_tau(empty, tau, worst_tau)

    def _load(self) -> Transformer:
        try:
            return Transformer(load(self.folder, DTYPES[self.settings.dtype], self.settings.device))
        except RuntimeError as error:  # torch's, of devices and their memory
            text = str(error).splitlines()[0]
            raise DiffusionError(f"--device {self.settings.device}: {text}; give another device") from None

    def _identity(self) -> str:
        """Of everything that the sums depend on, but not the device."""
        settings = asdict(self.settings) | {"text": "", "device": ""}
        samples = [[one.tokens, sorted(one.prefixes.items())] for one in self.samples]
        text = json.dumps([self.model.fingerprint, settings, samples])
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def _save(self, progress: Path, done: int) -> None:
        replace(progress, json.dumps({"run": self._identity(), "done": done, "sums": self._sums.shares}))

    def _resume(self, progress: Path) -> int:
        """How many samples are done."""
        try:
            found: dict[str, Any] = json.loads(progress.read_text())
        except (OSError, ValueError):
            return 0
        if not found.get("done"):
            return 0
        if found.get("run") != self._identity():
            raise DiffusionError(
                f"{progress} is an interrupted run with another model, text or settings; finish that one, "
                f"remove the file, or give another --out"
            )
        self._sums.shares = {int(percent): sums for percent, sums in found["sums"].items()}
        return int(found["done"])


def apply_tau(file: DepthFile, tau: float = TAU, worst_tau: float | None = None) -> DepthFile:
    """The table of the same similarities at other thresholds.

    Args:
        file: with similarities.
        tau: what a layer's mean similarity must exceed.
        worst_tau: what its least similar token must exceed too, if anything; our addition.

    Raises:
        DiffusionError: it has no similarities, or a threshold is out of its range.
    """
    if not file.similarities:
        raise DiffusionError("the file has no similarities, only depths; make a new one from text")
    check_taus(tau, worst_tau)
    found = [(one.share, _passing(one, worst_tau)) for one in file.similarities]
    table = make_table([(0, [1.0, *[-1.0] * (file.model.layers - 1)]), *found], "", tau)  # layer 0 is always exact
    changes = {"tau": tau, "worst_tau": worst_tau, "leading": dict(table.leading), "source": _source(file)}
    return file.model_copy(update=changes)


def check_taus(tau: float, worst_tau: float | None) -> None:
    """Whether they are thresholds.

    Raises:
        DiffusionError: one is out of its range.
    """
    if not 0 < tau < 1:
        raise DiffusionError(f"--tau {tau:g}: give a number between 0 and 1")
    if worst_tau is not None and not -1 <= worst_tau < 1:
        raise DiffusionError(f"--worst-tau {worst_tau:g}: give a number from -1 to below 1")


def _passing(one: Measured, worst_tau: float | None) -> list[float]:
    """Mean similarities, or -1 where the least similar token is too far off."""
    if worst_tau is None:
        return one.mean
    return [mean if worst > worst_tau else -1.0 for mean, worst in zip(one.mean, one.worst, strict=True)]


def _source(file: DepthFile) -> str:
    sampling = file.sampling
    text = f" on {sampling.text}, up to {sampling.samples} samples a share" if sampling else ""
    return f"forebay profile-depth{text}"


class _Sums:
    """Similarities so far, by share: exact in JSON, so that a run that goes on ends where it would have ended."""

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self.shares: dict[int, dict[str, Any]] = {}

    def add(self, found: dict[int, Similarity]) -> None:
        for percent, one in found.items():
            nothing = [0.0] * self._layers
            sums = self.shares.setdefault(percent, {"samples": 0, "mean": nothing, "worst": nothing})
            sums["samples"] += 1
            for kind, new in one._asdict().items():
                sums[kind] = [old + value for old, value in zip(sums[kind], new, strict=True)]

    def means(self) -> list[Measured]:
        return [
            Measured(
                share=percent,
                samples=sums["samples"],
                **{kind: [round(value / sums["samples"], 6) for value in sums[kind]] for kind in ("mean", "worst")},
            )
            for percent, sums in sorted(self.shares.items())
        ]


def _measure(transformer: Transformer, sample: Sample) -> dict[int, Similarity]:
    whole = _pass(transformer, sample.tokens)
    return {
        percent: compare(_pass(transformer, sample.tokens[:count]), whole) for percent, count in sample.prefixes.items()
    }


def _pass(transformer: Transformer, tokens: list[int]) -> list[KeyValues]:
    device = transformer.weights.norm_D.device
    ids, places = torch.tensor(tokens, device=device), torch.arange(len(tokens), device=device)
    return transformer.run([Rows(tokens_N=ids, positions_N=places, wanted=places[:0], keep=True)])[0].own


def _tokens(sample: Sample) -> int:
    return len(sample.tokens) + sum(sample.prefixes.values())
