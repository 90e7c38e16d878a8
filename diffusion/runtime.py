"""Many requests at once: what is admitted, which of them share a pass, and what has become final.

Requests join and leave between passes; a pass takes rows of all of them, whatever their prefix, depth, block and phase.
Those that start with the same prefix share its states.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from torch import Tensor

from forebay.diffusion.cache import PrefixCache
from forebay.diffusion.decoding import DecodingSettings, DiffusionRequest
from forebay.diffusion.depth import DepthTable, Rule
from forebay.diffusion.errors import DiffusionError
from forebay.diffusion.prefix import PrefixStates
from forebay.diffusion.transformer import Transformer


@dataclass(slots=True)
class Running:
    """A request of the runtime."""

    name: str
    prompt_N: Tensor
    prefix: int
    """Tokens of the prompt that others share."""
    settings: DecodingSettings
    depth: int = 0
    request: DiffusionRequest | None = None
    states: PrefixStates | None = None
    reported: int = 0
    """Blocks that have been reported."""


@dataclass(frozen=True, slots=True)
class Block:
    """A block of an answer that is final."""

    name: str
    tokens_N: Tensor
    last: bool


@dataclass(slots=True)
class Runtime:
    """Runs requests to their end.

    Args:
        transformer: the model.
        table: how deep a prefix may be reused; None reuses none.
        cache_bytes: for states of prefixes.
        rule: which depth the table gives.
        batch: requests in a pass, at most.
    """

    transformer: Transformer
    table: DepthTable | None
    cache_bytes: int
    rule: Rule = "boundary"
    batch: int = 32
    waiting: deque[Running] = field(default_factory=deque)
    running: list[Running] = field(default_factory=list)
    cache: PrefixCache = field(init=False)

    def __post_init__(self) -> None:
        depths = self.table.depths(self.rule) if self.table else [1]
        self.cache = PrefixCache(self.transformer, depths, self.cache_bytes)

    def submit(self, name: str, prompt_N: Tensor, settings: DecodingSettings, prefix: int = 0) -> None:
        """Queue a request.

        Args:
            name: of the request, in what `step` returns.
            prompt_N: all of its prompt.
            settings: how it is answered.
            prefix: how many of its first tokens others share.

        Raises:
            DiffusionError: it is longer than the model's positions, or its prefix longer than its prompt.
        """
        total, limit = len(prompt_N) + settings.length, self.transformer.config.positions
        if total > limit:
            raise DiffusionError(
                f"{len(prompt_N)} prompt tokens and {settings.length} to generate are {total}; the model has "
                f"{limit} positions"
            )
        if not 0 <= prefix <= len(prompt_N):
            raise DiffusionError(f"a prefix of {prefix} tokens in a prompt of {len(prompt_N)}")
        if self.transformer.config.shifted:
            prefix = min(prefix, len(prompt_N) - 1)
        self.waiting.append(Running(name, prompt_N, prefix, settings))

    def abort(self, name: str) -> None:
        """Forget a request, wherever it is."""
        self.waiting = deque(one for one in self.waiting if one.name != name)
        for one in [one for one in self.running if one.name == name]:
            self._leave(one)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self.waiting and not self.running

    def step(self) -> list[Block]:
        """One pass over all running requests; the blocks that it finished."""
        while self.waiting and len(self.running) < self.batch:
            self._enter(self.waiting.popleft())
        requests = [one.request for one in self.running if one.request is not None]
        for request, computed in zip(requests, self.transformer.run([one.rows() for one in requests]), strict=True):
            request.take(computed)
        return [block for one in list(self.running) for block in self._report(one)]

    def _enter(self, one: Running) -> None:
        prefix_P, rest_N = one.prompt_N[: one.prefix], one.prompt_N[one.prefix :]
        if self.table and one.prefix:
            one.depth = self.table.depth(one.prefix, len(one.prompt_N), one.settings.length, self.rule)
        if one.depth:
            one.states = self.cache.acquire(prefix_P)
        states = one.states or PrefixStates(prefix_P, [], {})
        one.request = DiffusionRequest(self.transformer, states, one.depth, rest_N, one.settings)
        self.running.append(one)

    def _report(self, one: Running) -> list[Block]:
        assert one.request is not None
        found = []
        size = one.settings.block
        while one.reported < one.request.finished_blocks:
            first = one.reported * size
            one.reported += 1
            last = one.reported == one.settings.blocks
            found.append(Block(one.name, one.request.answer[first : first + size].clone(), last))
        if one.request.done:
            self._leave(one)
        return found

    def _leave(self, one: Running) -> None:
        self.running.remove(one)
        if one.states is not None:
            self.cache.release(one.states)
