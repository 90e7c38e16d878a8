"""What the scheduler tells the workers at each step, and what rank 0 answers."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

from forebay.diffusion.decoding import DecodingSettings


@dataclass(frozen=True, slots=True)
class Entering:
    """A request that the runtime has not seen yet."""

    name: str
    prompt: list[int]
    settings: DecodingSettings
    prefix: int | None
    """Tokens that others share; None: to be found."""


@dataclass
class DiffusionStep(SchedulerOutput):
    """One call of the workers. What vLLM's own fields say is for its logs only."""

    entering: list[Entering] = field(default_factory=list)
    leaving: list[str] = field(default_factory=list)
    """Requests to forget."""
    passes: int = 0
    """Forward passes, at most: workers come back after a block, too."""
    forget_prefixes: bool = False


@dataclass(frozen=True, slots=True)
class BlockDone:
    """A final part of an answer."""

    name: str
    tokens: list[int]
    last: bool
    logprobs: LogprobsLists | None


@dataclass(frozen=True, slots=True)
class Started:
    """A request that left the runtime's queue."""

    name: str
    cached: int
    """Prompt tokens whose states were there already."""
    depth: int
    """Layers that reuse them."""


@dataclass
class DiffusionOutput(ModelRunnerOutput):
    """What came of a step."""

    blocks: list[BlockDone] = field(default_factory=list)
    started: list[Started] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """Requests that the runtime refused, and why."""
    counts: dict[str, float] = field(default_factory=dict)
    """The runtime's numbers since it started: see `metrics`."""
    passes: int = 0
