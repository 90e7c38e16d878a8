"""Many requests at once: what is admitted, which of them share a pass, and what has become final.

Requests join and leave between passes; a pass takes rows of all of them, whatever their prefix, depth, block and phase.
Those that start with the same prefix share its states. A pass is limited in its rows, so that refreshes, which have
many, come one after another instead of all at once: a request that does not fit waits for the next pass, which changes
when its tokens come but not which.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from torch import Tensor

from forebay.diffusion.cache import PrefixCache, StateStore
from forebay.diffusion.decoding import DecodingSettings, DiffusionRequest, advance
from forebay.diffusion.depth import TAU, DepthTable, Rule
from forebay.diffusion.errors import DiffusionError
from forebay.diffusion.logprobs import Logprobs
from forebay.diffusion.prefix import PrefixStates
from forebay.diffusion.prefixes import PrefixFinder
from forebay.diffusion.transformer import Transformer


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeSettings:
    """What a runtime may take and how it is careful."""

    cache_bytes: int = 4 << 30
    """For states of prefixes."""
    request_bytes: int | None = None
    """For what running requests keep beside them; None does not limit it."""
    batch: int = 32
    """Requests at once, at most."""
    rows: int = 8192
    """Rows of a pass, at most; a single request may have more."""
    rule: Rule = "boundary"
    """Which depth the table gives."""
    tau: float = TAU
    """Similarity that counts as stable."""
    audit: int = 32
    """The first request of a prefix and every so many after it find out whether its depth is safe; 0 never."""


@dataclass(slots=True)
class Running:
    """A request of the runtime."""

    name: str
    prompt_N: Tensor
    prefix: int
    """Tokens of the prompt that others share."""
    settings: DecodingSettings
    bytes: int
    """That it may keep, beside the states of its prefix."""
    request: DiffusionRequest | None = None
    states: PrefixStates | None = None
    cached: int = 0
    """Tokens of the prefix, where its states were there when it was needed."""
    reported: int = 0
    """Blocks that have been reported."""


@dataclass(frozen=True, slots=True)
class Block:
    """A block of an answer that is final."""

    name: str
    tokens_N: Tensor
    last: bool
    logprobs: Logprobs | None = None


@dataclass(slots=True)
class RuntimeStatistics:
    """Counts since the runtime was made."""

    steps: int = 0
    """Passes over all requests."""
    passes: int = 0
    """Of single requests."""
    refreshes: int = 0
    tokens: int = 0
    """Committed in finished blocks."""
    audits: int = 0
    interventions: int = 0
    """Audits that lowered the depth of a prefix."""
    depths: dict[int, int] = field(default_factory=dict)
    """Requests by the layers that they reused."""


class Runtime:
    """Runs requests to their end.

    Args:
        transformer: the model.
        table: how deep a prefix may be reused; None reuses none.
        settings: limits.
        store: where states of prefixes outlive the process.
        finder: finds prefixes that nobody names; one without markers of chats where it is None.
    """

    def __init__(
        self,
        transformer: Transformer,
        table: DepthTable | None,
        settings: RuntimeSettings | None = None,
        store: StateStore | None = None,
        finder: PrefixFinder | None = None,
    ) -> None:
        self.transformer = transformer
        self.table = table
        self.settings = settings or RuntimeSettings()
        self.cache = PrefixCache(transformer, self.settings.cache_bytes, store)
        self.finder = finder or PrefixFinder(shifted=transformer.config.shifted)
        self.statistics = RuntimeStatistics()
        self.waiting: deque[Running] = deque()
        self.running: deque[Running] = deque()
        """In the order in which they get into a pass."""

    def submit(self, name: str, prompt_N: Tensor, settings: DecodingSettings, prefix: int | None = None) -> None:
        """Queue a request.

        Args:
            name: of the request, in what `step` returns.
            prompt_N: all of its prompt, best in the host's memory.
            settings: how it is answered.
            prefix: how many of its first tokens others share; None finds out.

        Raises:
            DiffusionError: it is longer than the model's positions, or its prefix longer than its prompt, or it needs
                more memory than there is for all.
        """
        total, limit = len(prompt_N) + settings.length, self.transformer.config.positions
        if total > limit:
            raise DiffusionError(
                f"{len(prompt_N)} prompt tokens and {settings.length} to generate are {total}; the model has "
                f"{limit} positions"
            )
        if not 0 <= (prefix or 0) <= len(prompt_N):
            raise DiffusionError(f"a prefix of {prefix} tokens in a prompt of {len(prompt_N)}")
        if self.transformer.config.shifted and not len(prompt_N):
            raise DiffusionError("the prompt is empty; this model needs a token before the answer")
        needed, space = total * self.bytes_per_token, self.settings.request_bytes
        if space is not None and needed > space:
            raise DiffusionError(f"{total} tokens need {needed} bytes of keys and values; there are {space} for all")
        found = self.finder.find(prompt_N.cpu().numpy(), prefix) if self.table and not settings.exact else 0
        self.waiting.append(Running(name, prompt_N, found, settings, needed))

    def abort(self, name: str) -> None:
        """Forget a request, wherever it is."""
        self.waiting = deque(one for one in self.waiting if one.name != name)
        for one in [one for one in self.running if one.name == name]:
            self._leave(one)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self.waiting and not self.running

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of all layers in this process."""
        layers = self.transformer.weights.layers
        pairs = layers[0].qkv.shape[0] - layers[0].attention_output.shape[1]
        return int(pairs * layers[0].qkv.element_size() * len(layers))

    def step(self) -> list[Block]:
        """One pass over the requests that fit into it; the blocks that it finished."""
        self._admit()
        chosen = self._choose()
        if not chosen:
            return []
        requests = [one.request for one in chosen if one.request is not None]
        self.statistics.steps += 1
        advance(self.transformer, requests)
        for request in requests:
            self._note_audit(request)
        return [block for one in chosen for block in self._report(one)]

    def _admit(self) -> None:
        """First come, first served, as far as places and memory go; one in any case."""
        space = self.settings.request_bytes
        while self.waiting and len(self.running) < self.settings.batch:
            taken = sum(one.bytes for one in self.running)
            if space is not None and self.running and taken + self.waiting[0].bytes > space:
                return
            self._enter(self.waiting.popleft())

    def _choose(self) -> list[Running]:
        """The requests of this pass: who was left out longest comes first; whom it takes goes to the end."""
        left = self.settings.rows
        chosen: list[Running] = []
        rest: list[Running] = []
        for one in self.running:
            assert one.request is not None
            weight = one.request.weight
            if weight <= left or not chosen:
                chosen.append(one)
                left -= weight
            else:
                rest.append(one)
        self.running = deque(rest + chosen)
        return chosen

    def _enter(self, one: Running) -> None:
        device = self.transformer.weights.norm_D.device
        prefix_P, rest_N = one.prompt_N[: one.prefix], one.prompt_N[one.prefix :].to(device)
        depth, audit = 0, False
        if self.table and one.prefix:
            depth = self.table.depth(one.prefix, len(one.prompt_N), one.settings.length, self.settings.rule)
            hits = self.cache.statistics.hits
            one.states = self.cache.acquire(prefix_P, depth)
            one.cached = one.prefix if self.cache.statistics.hits > hits else 0
            depth = depth if one.states.limit is None else min(depth, one.states.limit)
            every = self.settings.audit
            audit = bool(every) and (self.cache.requests(one.states) - 1) % every == 0
        one.request = DiffusionRequest(
            self.transformer, one.states or PrefixStates(prefix_P.to(device)), depth, rest_N, one.settings,
            tau=self.settings.tau, audit=audit,
        )  # fmt: skip
        self.statistics.audits += audit
        self.running.append(one)

    def _note_audit(self, request: DiffusionRequest) -> None:
        if request.passes.lowered:
            request.passes.lowered = False
            self.statistics.interventions += 1
            self.cache.grown(request.passes.states)

    def _report(self, one: Running) -> list[Block]:
        assert one.request is not None
        found = []
        size, request = one.settings.block, one.request
        while one.reported < request.finished_blocks:
            first = one.reported * size
            one.reported += 1
            tokens_N = request.answer[first : first + size].clone()
            last = request.done and one.reported == request.finished_blocks
            logprobs = request.logprobs.part(first, first + size) if request.logprobs else None
            found.append(Block(one.name, tokens_N, last, logprobs))
            self.statistics.tokens += len(tokens_N)
        if request.done:
            self._leave(one)
        return found

    def _leave(self, one: Running) -> None:
        self.running.remove(one)
        assert one.request is not None
        passes, statistics = one.request.passes, self.statistics
        statistics.passes += passes.counts.passes
        statistics.refreshes += passes.counts.refreshes
        statistics.depths[passes.depth] = statistics.depths.get(passes.depth, 0) + 1
        if one.states is not None:
            self.cache.release(one.states)
