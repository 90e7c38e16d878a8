"""The file that holds a model's depth table, and the similarities that it was made of."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from forebay.diffusion.errors import DiffusionError

TAU = 0.97
"""Similarity above which a layer counts as stable (the paper's main setting)."""
Cosine = Annotated[float, Field(ge=-1.001, le=1.001)]
Share = Annotated[int, Field(ge=0, le=100)]
"""Per cent of a request that is prefix."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Model(_Part):
    """Which model the table is of."""

    layers: Annotated[int, Field(ge=1)]
    name: str = ""
    fingerprint: str = ""
    """See `fingerprint.py`; empty where it is not known."""


class Sampling(_Part):
    """What was looked at."""

    text: str
    """Name of the file or folder."""
    samples: int
    """Asked for, of each share."""
    length: int
    """Tokens of a window of text."""
    seed: int
    dtype: str


class Measured(_Part):
    """Similarities at one share, by layer."""

    share: Share
    samples: Annotated[int, Field(ge=1)]
    mean: list[Cosine]
    """Over keys and values, tokens and samples."""
    worst: list[Cosine]
    """Of each sample's least similar token, mean over samples: unlike the minimum of all, it does not fall with their
    number."""


class DepthFile(_Part):
    """Everything in the file. Depths are left open: both rules follow from the leading similar layers."""

    version: Literal[1] = 1
    model: Model
    tau: Annotated[float, Field(gt=0, lt=1)] = TAU
    worst_tau: Annotated[float, Field(ge=-1, lt=1)] | None = None
    leading: dict[Share, int]
    """From which share on how many leading layers are similar: both ascending."""
    source: str = ""
    sampling: Sampling | None = None
    similarities: list[Measured] = []

    @model_validator(mode="after")
    def _check(self) -> DepthFile:
        shares, counts, layers = list(self.leading), list(self.leading.values()), self.model.layers
        if shares != sorted(shares) or counts != sorted(counts):
            raise ValueError("leading: shares and layers must both rise")
        if any(not 1 <= count <= layers for count in counts):
            raise ValueError(f"leading: every number of layers must be 1 to {layers}, which the model has")
        for one in self.similarities:
            if {len(one.mean), len(one.worst)} != {layers}:
                raise ValueError(f"similarities at share {one.share}: must be {layers} numbers, one a layer")
        return self


def read_file(path: Path) -> DepthFile:
    """Read and check it.

    Raises:
        DiffusionError: it cannot be read, or is no such file.
    """
    try:
        return DepthFile.model_validate_json(path.read_bytes())
    except OSError as error:
        raise DiffusionError(f"{path}: {error.strerror}; give a file of `forebay profile-depth`") from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise DiffusionError(
            f"{path} is no depth table: {place + ': ' if place else ''}{first['msg']}; "
            f"make it with `forebay profile-depth`"
        ) from None


def write_file(path: Path, file: DepthFile) -> None:
    """Write it, whole or not at all.

    Raises:
        DiffusionError: the file cannot be written.
    """
    replace(path, file.model_dump_json(indent=1))


def replace(path: Path, text: str) -> None:
    """A file's new content, whole or not at all.

    Raises:
        DiffusionError: the file cannot be written.
    """
    beside = path.with_name(f"{path.name}.new")
    try:
        beside.write_text(text + "\n")
        beside.replace(path)
    except OSError as error:
        raise DiffusionError(f"{path}: {error.strerror}; give a file that can be written") from None
