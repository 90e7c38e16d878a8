"""Server-wide settings of diffusion models: the key `forebay` of vLLM's `--additional-config`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from forebay.diffusion.errors import DiffusionError
from forebay.storage.units import parse_bytes

KEY = "forebay"
Size = Annotated[int, BeforeValidator(parse_bytes)]
Remasking = Literal["confidence", "entropy", "margin", "random"]
BlockCache = Literal["none", "prefix", "dual"]


class ServingConfig(BaseModel):
    """How answers are made where a request does not say, and how prefixes are reused.

    `vllm serve MODEL --additional-config '{"forebay": {"rule": "paper", "cache": "8GiB"}}'`
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    length: int = Field(256, ge=1)
    """Tokens of an answer where the client names no limit (the paper's evaluation)."""
    tokens_per_step: float = Field(2.0, gt=0)
    """Steps are the answer's length divided by this (the paper's evaluation: 256 tokens in 128 steps)."""
    block: int = Field(32, ge=1)
    """Tokens of a block, which is also what is streamed at once."""
    refresh: int = Field(16, ge=0)
    """T: steps between two refreshes of the prefix; 0 refreshes when a block begins."""
    remasking: Remasking = "confidence"
    threshold: float | None = Field(None, gt=0, lt=1)
    """Commit everything surer than this instead of a fixed number of tokens (Fast-dLLM)."""
    block_cache: BlockCache = "none"
    """Fast-dLLM's cache within a request."""
    adaptive: bool = False
    """Whether the time between refreshes follows the drift that was measured."""
    exact: bool = False
    """Whether nothing is reused at all: no prefix, and every step computes every row."""
    rule: Literal["boundary", "paper"] = "boundary"
    """Which depth the table gives: see `forebay.diffusion.depth`."""
    tau: float | None = Field(None, gt=0, le=1)
    """Similarity that the guard asks for where a prefix is refreshed; without it that of the table."""
    table: Path | None = None
    """A depth table that `forebay profile-depth` wrote; without one, that of the published models."""
    cache: Size | None = None
    """Bytes for states of prefixes, such as "8GiB"; without it a quarter of the memory for requests."""
    pool: Path | dict[str, Any] | None = None
    """The path of a `pool.yaml`, or its keys: where states of prefixes go that memory has no room for, and where they
    outlive a restart."""


def read_config(additional: Mapping[str, Any] | Any) -> ServingConfig:
    """The settings out of vLLM's additional configuration.

    Raises:
        DiffusionError: a key is unknown or a value wrong.
    """
    found = additional.get(KEY) if isinstance(additional, Mapping) else None
    if not isinstance(found or {}, Mapping):
        raise DiffusionError(f'"{KEY}" in --additional-config is {found!r}; give an object such as {{"block": 32}}')
    try:
        return ServingConfig.model_validate(dict(found or {}))
    except ValidationError as error:
        raise DiffusionError(f'"{KEY}" in --additional-config: {one_line(error, ServingConfig)}') from None


def one_line(error: ValidationError, model: type[BaseModel]) -> str:
    """What is wrong with the first value that is."""
    first = error.errors()[0]
    name = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        return f"{name} is unknown; known are {', '.join(model.model_fields)}"
    return f"{name} is {first['input']!r}; {first['msg'][0].lower()}{first['msg'][1:]}"
