"""Log-probabilities of an answer's tokens, as they were when each token was committed.

From the model's distribution before temperature and top-p, without the mask, which is never chosen.

Shape letters: N tokens of the answer, K alternatives, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class Logprobs:
    """Of every token; nothing of use where there is no token yet."""

    chosen_N: Tensor
    ranks_N: Tensor
    """Of the chosen token among all, from 1."""
    tokens_NK: Tensor
    """The most probable ones, in descending order."""
    values_NK: Tensor

    @classmethod
    def empty(cls, length: int, alternatives: int) -> Logprobs:
        """Of an answer that is still to be made."""
        best = torch.zeros(length, alternatives)
        return cls(torch.zeros(length), torch.zeros(length, dtype=torch.long), best.long(), best)

    def put(self, places: Tensor, logits_NV: Tensor, tokens: Tensor) -> None:
        """Note tokens that have just been committed, with the logits that they were chosen from."""
        places = places.cpu()
        all_NV = logits_NV.log_softmax(-1)
        chosen = all_NV.gather(-1, tokens[:, None])
        best = all_NV.topk(self.tokens_NK.shape[1], dim=-1)
        self.chosen_N[places] = chosen[:, 0].cpu()
        self.ranks_N[places] = (all_NV > chosen).sum(-1).cpu() + 1
        self.tokens_NK[places], self.values_NK[places] = best.indices.cpu(), best.values.cpu()

    def part(self, first: int, last: int) -> Logprobs:
        """Of some tokens."""
        return Logprobs(*(one[first:last] for one in (self.chosen_N, self.ranks_N, self.tokens_NK, self.values_NK)))
