"""Which masked positions get their token in a step, and which token.

Scores of a position, all from the distribution over its tokens after temperature and top-p (as Dream has it; LLaDA
takes the probability before them, which is the same at its temperature of 0):

* `confidence`: the probability of the chosen token (LLaDA, arXiv 2502.09992: low-confidence remasking; Dream:
  `maskgit_plus`);
* `entropy`: the negative entropy (Dream, arXiv 2508.15487);
* `margin`: the lead of the most over the second most probable token (Dream: `topk_margin`);
* `random`: any order.

Shape letters: N masked positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Score = Callable[[Tensor, Tensor, torch.Generator | None], Tensor]


@dataclass(frozen=True, slots=True)
class Choice:
    """For every masked position."""

    tokens_N: Tensor
    scores_N: Tensor
    """Higher is surer."""


def without(logits_NV: Tensor, mask_token: int) -> Tensor:
    """Logits in float32 in which the mask is impossible: it is never an answer. May change what it is given."""
    logits_NV = logits_NV.float()
    logits_NV[:, mask_token] = -torch.inf
    return logits_NV


def choose(
    logits_NV: Tensor,
    *,
    remasking: str = "confidence",
    temperature: float = 0.0,
    top_p: float = 1.0,
    random: torch.Generator | None = None,
) -> Choice:
    """A token for every position, and how sure it is.

    Args:
        logits_NV: of the masked positions, in float32.
        remasking: a key of `SCORES`.
        temperature: 0 takes the most probable token.
        top_p: share of the probability to choose from, where the temperature is above 0.
        random: source of chance.
    """
    if temperature > 0:
        chances_NV = _nucleus((logits_NV / temperature).softmax(-1), top_p)
        tokens_N = torch.multinomial(chances_NV, 1, generator=random)[:, 0]
    else:
        chances_NV = logits_NV.softmax(-1)
        tokens_N = chances_NV.argmax(-1)
    return Choice(tokens_N, SCORES[remasking](chances_NV, tokens_N, random))


def _nucleus(chances_NV: Tensor, top_p: float) -> Tensor:
    """Only the most probable tokens that together reach `top_p`, at least one."""
    if top_p >= 1:
        return chances_NV
    ordered, order = chances_NV.sort(-1, descending=True)
    dropped = ordered.cumsum(-1) - ordered >= top_p
    dropped[:, 0] = False
    kept = ordered.masked_fill(dropped, 0.0)
    return torch.zeros_like(chances_NV).scatter(-1, order, kept / kept.sum(-1, keepdim=True))


def _confidence(chances_NV: Tensor, tokens_N: Tensor, random: torch.Generator | None) -> Tensor:
    return chances_NV.gather(-1, tokens_N[:, None])[:, 0]


def _entropy(chances_NV: Tensor, tokens_N: Tensor, random: torch.Generator | None) -> Tensor:
    return torch.special.xlogy(chances_NV, chances_NV).sum(-1)


def _margin(chances_NV: Tensor, tokens_N: Tensor, random: torch.Generator | None) -> Tensor:
    first, second = chances_NV.topk(2, dim=-1).values.unbind(-1)
    return first - second


def _random(chances_NV: Tensor, tokens_N: Tensor, random: torch.Generator | None) -> Tensor:
    return torch.rand(len(tokens_N), generator=random, device=tokens_N.device)


SCORES: dict[str, Score] = {"confidence": _confidence, "entropy": _entropy, "margin": _margin, "random": _random}
"""By name."""


def quota(masked: int, steps: int, step: int) -> int:
    """Positions to commit in a step when a block's `masked` positions are spread evenly over its steps.

    The first steps take one more where it does not divide (LLaDA's linear schedule).
    """
    base, rest = divmod(masked, steps)
    return base + (step < rest)


def commit(scores_N: Tensor, count: int, threshold: float | None = None) -> tuple[Tensor, Tensor]:
    """Places to fill in this step, at least one, and those that stay, in their order.

    Args:
        scores_N: of the masked positions.
        count: how many, the surest first.
        threshold: instead, all that are surer than this (Fast-dLLM's parallel decoding, arXiv 2505.22618).
    """
    if threshold is not None:
        count = max(1, int((scores_N > threshold).sum()))
    order = scores_N.argsort(descending=True, stable=True)
    return order[:count], order[count:].sort().values
