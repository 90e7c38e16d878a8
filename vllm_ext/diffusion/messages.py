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


@dataclass(frozen=True, slots=True)
class Counts:
    """The runtime's numbers since it was made, and what it holds now."""

    prefix_hits: int = 0
    prefix_misses: int = 0
    prefix_restored: int = 0
    prefix_evictions: int = 0
    passes: int = 0
    steps: int = 0
    refreshes: int = 0
    tokens: int = 0
    audits: int = 0
    guard_interventions: int = 0
    depths: dict[int, int] = field(default_factory=dict)
    """Finished requests by the layers that they reused."""
    prefixes: int = 0
    state_bytes: int = 0
    pool_bytes: int = 0
    usage: float = 0.0
    """Share of the memory for requests that is taken, 0 to 1."""


@dataclass
class DiffusionOutput(ModelRunnerOutput):
    """What came of a step."""

    blocks: list[BlockDone] = field(default_factory=list)
    started: list[Started] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """Requests that the runtime refused, and why."""
    counts: Counts = field(default_factory=Counts)
    passes: int = 0
