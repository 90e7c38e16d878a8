"""How many layers may reuse a shared prefix: tables from the prefix's share of a request to a depth b.

A table is made by comparing, layer by layer, the keys and values of prefixes alone with those of the same prefixes in
whole sequences (BiCache, arXiv 2606.07571). Two rules turn similarities into a depth:

* `paper`: b is the number of leading layers that are similar enough;
* `boundary` (ours, the default): one less, at least 1. The state that is handed to layer b was made by the prefix
  alone, and so fixes the prefix's keys and values of layer b too: it must be similar enough itself. Where all layers
  are, nothing is handed on, and both rules reuse all of them.
"""

from __future__ import annotations

import json
import logging
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from forebay.diffusion.attention import KeyValues
from forebay.diffusion.config import DiffusionConfig
from forebay.diffusion.depth_file import TAU as TAU
from forebay.diffusion.depth_file import DepthFile, Model, read_file, write_file
from forebay.diffusion.errors import DiffusionError
from forebay.diffusion.fingerprint import fingerprint

logger = logging.getLogger(__name__)

Rule = Literal["paper", "boundary"]
FILE = "forebay_depth.json"
"""The name of a model's own table, in its folder."""


@dataclass(frozen=True, slots=True)
class DepthTable:
    """Depths by share of the request, in percent."""

    leading: Mapping[int, int]
    """From which share on how many leading layers are similar: both ascending."""
    layers: int
    """Of the model."""
    source: str
    """Where it comes from."""
    tau: float = TAU
    """Similarity above which a layer counted as stable."""

    @classmethod
    def read(cls, path: Path, layers: int | None = None) -> DepthTable:
        """The table in a file of `forebay profile-depth`.

        Args:
            path: the file.
            layers: of the model that it is for; None does not check.

        Raises:
            DiffusionError: it cannot be read, is no such file, or is for another number of layers.
        """
        found = read_file(path)
        if layers not in (None, found.model.layers):
            raise DiffusionError(
                f"{path} is of a model with {found.model.layers} layers, this one has {layers}; "
                f"make a table with `forebay profile-depth`"
            )
        return cls(found.leading, found.model.layers, found.source, found.tau)

    def write(self, path: Path) -> None:
        """Write it as a file that `read` reads, without the similarities that it was made of.

        Raises:
            DiffusionError: the file cannot be written.
        """
        model = Model(layers=self.layers)
        write_file(path, DepthFile(model=model, tau=self.tau, leading=dict(self.leading), source=self.source))

    def depth(self, prefix: int, prompt: int, generation: int, rule: Rule = "boundary") -> int:
        """b for a request, from 1 to the number of layers.

        Args:
            prefix: tokens of the shared prefix.
            prompt: tokens of the whole prompt, the prefix included.
            generation: tokens to be generated: they count as part of the request, as published.
            rule: see above.
        """
        shares = sorted(self.leading)
        place = bisect_right(shares, share(prefix, prompt + generation)) - 1
        leading = self.leading[shares[place]] if place >= 0 else 1
        if rule == "paper" or leading == self.layers:
            return max(1, leading)
        return max(1, leading - 1)


def share(prefix: int, total: int) -> int:
    """r: per cent of a request that is prefix, half to even."""
    return round(100 * prefix / total)


class Similarity(NamedTuple):
    """Of a prefix that is alone and the same prefix within a sequence, by layer."""

    mean: list[float]
    """Over its tokens."""
    worst: list[float]
    """Of its least similar token (our addition: a mean hides a few tokens that everything hangs on)."""


def compare(alone: Sequence[KeyValues], together: Sequence[KeyValues]) -> Similarity:
    """Cosines of keys and values, all heads as one vector; a token's similarity is the mean of both.

    Keys carry RoPE. That is a rotation which depends on the position alone, so the cosine is that without it.

    Args:
        alone: of the prefix alone.
        together: of the whole sequence, whose first rows are the prefix.
    """
    tokens_LP = torch.stack([_tokens(mine, theirs) for mine, theirs in zip(alone, together, strict=True)])
    return Similarity(tokens_LP.mean(1).tolist(), tokens_LP.amin(1).tolist())


def similarity(alone: Sequence[KeyValues], together: Sequence[KeyValues]) -> list[float]:
    """The means of `compare`, as published."""
    return compare(alone, together).mean


def _tokens(alone: KeyValues, together: KeyValues) -> Tensor:
    cosines = [
        functional.cosine_similarity(mine.flatten(1).float(), theirs[: len(mine)].flatten(1).float(), dim=-1)
        for mine, theirs in zip(alone, together, strict=True)
    ]
    return (cosines[0] + cosines[1]) / 2


def make_table(found: Iterable[tuple[int, Sequence[float]]], source: str, tau: float = TAU) -> DepthTable:
    """A table from mean similarities by share.

    Depths never fall as the share grows: a running maximum, as published.

    Args:
        found: share in percent, and the similarity of every layer.
        source: for the record.
        tau: similarity that counts as stable.
    """
    leading: dict[int, int] = {}
    best = layers = 0
    for percent, similarities in sorted(found):
        layers = len(similarities)
        count = next((layer for layer, value in enumerate(similarities) if value <= tau), layers)
        if count > best:
            leading[percent] = best = count
    return DepthTable(leading, layers, source, tau)


def _parse(text: str) -> dict[int, int]:
    return {int(one): int(two) for one, two in (pair.split(":") for pair in text.split())}


PROFILED = "the official profiler at tau 0.97 and 500 samples a share, run by the authors of ACache (sands-lab/ACache)"
TABLES = {
    "LLaDA-8B-Instruct": DepthTable(
        _parse(
            "0:1 5:2 10:3 13:5 15:7 20:8 21:9 30:10 49:11 54:13 66:14 68:15 73:16 87:17 93:18 95:19 97:20 98:22 99:32"
        ),
        32,
        PROFILED,
    ),
    "Dream-v0-Instruct-7B": DepthTable(
        _parse("0:1 9:2 10:4 19:5 32:6 47:7 56:8 63:9 76:12 85:13 86:14 92:16 94:17 95:18 96:28"), 28, PROFILED
    ),
}
"""Of models that others have profiled."""


def find_table(folder: Path, config: DiffusionConfig) -> DepthTable:
    """The table to serve a model with: its own, else one that ships with us, else none but the first layer.

    Args:
        folder: of the model. Its own table is `forebay_depth.json` in it.
        config: the model's.

    Raises:
        DiffusionError: its own table cannot be read, or has another number of layers.
    """
    if (folder / FILE).exists():
        _check_model(folder)
        return DepthTable.read(folder / FILE, config.layers)
    for name, table in TABLES.items():
        if table.layers == config.layers and name in _names(folder):
            return table
    logger.warning(
        "%s: nobody has measured how deep this model's prefixes may be reused, so only one layer is; "
        "`forebay profile-depth %s --text DIR --out %s` measures it",
        folder, folder, folder / FILE,
    )  # fmt: skip
    return DepthTable({0: 1}, config.layers, "not measured: the first layer's keys and values are always exact")


def _check_model(folder: Path) -> None:
    made = read_file(folder / FILE).model.fingerprint
    if made and made != fingerprint(folder):
        logger.warning(
            "%s was made for other weights than those beside it; `forebay profile-depth %s` makes it anew",
            folder / FILE, folder,
        )  # fmt: skip


def _names(folder: Path) -> set[str]:
    """What the model is called: by its folders (a hub's cache has `models--OWNER--NAME`), and by itself."""
    try:
        own = str(json.loads((folder / "config.json").read_text()).get("_name_or_path", ""))
    except (OSError, ValueError):
        own = ""
    parts = [*folder.absolute().parts[-3:], own.rpartition("/")[2]]
    return {part.rpartition("--")[2] for part in parts}
