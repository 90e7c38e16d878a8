"""One request from its prompt to its answer: which rows each pass needs, and what becomes of their logits.

Generation is semi-autoregressive (LLaDA, arXiv 2502.09992): the answer is cut into blocks, which are filled one after
the other, each in its share of the steps. The request says which rows the next pass is to compute and takes what came
of them, so that whoever drives it can put many requests into one pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from forebay.diffusion.depth import TAU
from forebay.diffusion.errors import DiffusionError
from forebay.diffusion.logprobs import Logprobs
from forebay.diffusion.passes import BLOCK_CACHES, BlockCache, Passes, Span
from forebay.diffusion.prefix import PrefixStates
from forebay.diffusion.remasking import SCORES, choose, commit, quota, without
from forebay.diffusion.transformer import Computed, Rows, Transformer


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodingSettings:
    """How an answer is made. The defaults are those of BiCache's evaluation (arXiv 2606.07571) on LLaDA.

    Raises:
        DiffusionError: a value is out of its range, or they do not fit together.
    """

    length: int = 256
    """Tokens of the answer."""
    steps: int = 128
    block: int = 32
    """Tokens of a block."""
    refresh: int = 16
    """T: every so many steps the rows of the prefix are computed anew, in the layers that do not reuse it. 0: when a
    block begins."""
    adaptive: bool = False
    """Whether T follows the measured drift of the prefix, from a quarter to four times of it (ours)."""
    block_cache: BlockCache = "none"
    """What is reused within a block (Fast-dLLM's `prefix` and `dual` cache, arXiv 2505.22618)."""
    exact: bool = False
    """No reuse of anything: every step computes every row."""
    remasking: str = "confidence"
    temperature: float = 0.0
    top_p: float = 1.0
    threshold: float | None = None
    """Commit everything surer than this instead of a fixed number (Fast-dLLM, arXiv 2505.22618; there 0.9)."""
    seed: int = 0
    ignore_end: bool = False
    """Whether to go on behind an end token; else the request ends with the block that it is in."""
    logprobs: int | None = None
    """Alternatives to report with each token's log-probability at the time of its commitment; None reports nothing."""

    def __post_init__(self) -> None:
        least = {"length": 1, "steps": 1, "block": 1, "refresh": 0}
        for name, limit in least.items():
            if getattr(self, name) < limit:
                raise DiffusionError(f"{name} is {getattr(self, name)}; it must be at least {limit}")
        for name, known in {"remasking": tuple(SCORES), "block_cache": BLOCK_CACHES}.items():
            if getattr(self, name) not in known:
                raise DiffusionError(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(known)}")
        if self.logprobs is not None and self.logprobs < 0:
            raise DiffusionError(f"logprobs is {self.logprobs}; it must be 0 or more")
        if self.temperature < 0:
            raise DiffusionError(f"temperature is {self.temperature:g}; it must be 0 or more")
        if not 0 < self.top_p <= 1:
            raise DiffusionError(f"top_p is {self.top_p:g}; it must be above 0 and at most 1")
        if self.threshold is not None and not 0 < self.threshold < 1:
            raise DiffusionError(f"threshold is {self.threshold:g}; it must be between 0 and 1")

    @property
    def blocks(self) -> int:
        """The last one may be shorter."""
        return -(-self.length // self.block)


class DiffusionRequest:
    """A request on its way.

    Args:
        transformer: the model.
        states: of the prefix, which ends before the last prompt token where the model's logits are shifted.
        depth: b, how many layers reuse the prefix.
        prompt_N: what follows on the prefix.
        settings: how the answer is made.
        tau: similarity that counts as stable, for an interval that follows the drift and for the audit.
        audit: whether to begin with a pass that finds out whether b is safe for this request.
    """

    def __init__(
        self,
        transformer: Transformer,
        states: PrefixStates,
        depth: int,
        prompt_N: Tensor,
        settings: DecodingSettings,
        *,
        tau: float = TAU,
        audit: bool = False,
    ) -> None:
        if transformer.config.shifted and not len(prompt_N):
            raise DiffusionError("the prefix takes the whole prompt; this model needs its last token outside of it")
        self.transformer = transformer
        self.settings = settings
        self.passes = Passes(
            transformer,
            states,
            0 if settings.exact else depth,
            1 if settings.exact else settings.refresh,
            "none" if settings.exact else settings.block_cache,
            tau,
            adaptive=settings.adaptive and not settings.exact,
            audit=audit and not settings.exact,
        )
        self._mask = transformer.config.mask_token
        self._shift = int(transformer.config.shifted)
        self._prompt = len(prompt_N)
        masks = torch.full((settings.length,), self._mask, device=prompt_N.device)
        self.tokens_N = torch.cat([prompt_N, masks])
        self.logprobs = None if settings.logprobs is None else Logprobs.empty(settings.length, settings.logprobs)
        self._random = torch.Generator(prompt_N.device).manual_seed(settings.seed)
        self._ends = torch.tensor(transformer.config.end_tokens, device=prompt_N.device)
        self._block = self._block_step = 0
        self._open = self._all_of_block()
        """Places of the current block that are still masked."""
        self._ended = False

    @property
    def done(self) -> bool:
        """Whether the answer is there."""
        return self._ended or self._block == self.settings.blocks

    @property
    def answer(self) -> Tensor:
        """The answer so far, with masks where nothing is yet."""
        return self.tokens_N[self._prompt :]

    @property
    def finished_blocks(self) -> int:
        """How many are final."""
        return self._block

    @property
    def weight(self) -> int:
        """Rows that the next pass computes, in whole layers' worth."""
        return self.passes.weight(len(self.tokens_N), self._rows_of_block(), self._begins)

    def rows(self) -> Rows:
        """What the next pass is to compute."""
        wanted_N = self._open - self._shift
        return self.passes.rows(self.tokens_N, self._rows_of_block(), wanted_N, self._begins)

    def take(self, computed: Computed, logits_NV: Tensor) -> None:
        """Fill in what the pass is sure of.

        Args:
            computed: what it left behind.
            logits_NV: of the rows that were wanted; may be changed.
        """
        if not self.passes.take(computed, self._begins):
            return
        settings = self.settings
        logits_NV = without(logits_NV, self._mask)
        found = choose(
            logits_NV, remasking=settings.remasking, temperature=settings.temperature, top_p=settings.top_p,
            random=self._random,
        )  # fmt: skip
        places, left = commit(found.scores_N, self._quota(), settings.threshold)
        filled = self._open[places]
        self.tokens_N[filled] = found.tokens_N[places]
        if self.logprobs is not None:
            self.logprobs.put(filled - self._prompt, logits_NV[places], found.tokens_N[places])
        self._open = self._open[left]
        self._advance()

    @property
    def _begins(self) -> bool:
        """Whether the next pass is its block's first."""
        return not self._block_step

    def _span(self) -> Span:
        """The current block within `tokens_N`; empty when all are done."""
        first = min(self._prompt + self._block * self.settings.block, len(self.tokens_N))
        return Span(first, min(first + self.settings.block, len(self.tokens_N)))

    def _rows_of_block(self) -> Span:
        """Those that a pass over the current block computes: where logits are shifted, one more."""
        first, last = self._span()
        return Span(first - self._shift, last)

    def _all_of_block(self) -> Tensor:
        return torch.arange(*self._span(), device=self.tokens_N.device)

    def _quota(self) -> int:
        first, last = self._span()
        steps = max(1, self.settings.steps // self.settings.blocks)
        return max(1, quota(last - first, steps, self._block_step))

    def _advance(self) -> None:
        self._block_step += 1
        if len(self._open):
            return
        if len(self._ends) and not self.settings.ignore_end:
            self._ended = bool(torch.isin(self.tokens_N[slice(*self._span())], self._ends).any())
        self._block, self._block_step = self._block + 1, 0
        self._open = self._all_of_block()


def advance(transformer: Transformer, requests: Sequence[DiffusionRequest]) -> None:
    """One pass over some requests; the output layer is read once for all of them."""
    found = transformer.run([request.rows() for request in requests])
    hidden = [computed.hidden_ND for computed in found]
    logits = transformer.logits(torch.cat(hidden)).split([len(part) for part in hidden])
    for request, computed, logits_NV in zip(requests, found, logits, strict=True):
        request.take(computed, logits_NV)
