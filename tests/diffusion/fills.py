"""Gaps in text: how well a model fills them, with a prefix that it reuses or not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from forebay.diffusion.prefix import PrefixStates
from forebay.diffusion.transformer import Rows, Transformer


class Gaps(NamedTuple):
    prefix_P: Tensor
    text_N: Tensor
    """What follows on the prefix."""
    gaps: Tensor
    """Places in it."""


def gaps(model: Path, text: Path, *, prefix: int, rest: int, share: float, begin: list[int]) -> Iterator[Gaps]:
    """From all documents of a folder, the same every time.

    Args:
        model: folder with the tokenizer.
        text: folder of `.md` files.
        prefix: tokens of each prefix.
        rest: tokens behind it.
        share: of these that are gaps; never the first, as a shifted model has nothing before it.
        begin: tokens in front of every text.
    """
    tokenizer, random = Tokenizer.from_file(str(model / "tokenizer.json")), torch.Generator().manual_seed(0)
    for path in sorted(text.glob("*.md")):
        tokens = torch.tensor(tokenizer.encode(path.read_text(), add_special_tokens=False).ids)
        size = prefix + rest - len(begin)
        for window in tokens[: len(tokens) // size * size].view(-1, size):
            ids = torch.cat([torch.tensor(begin, dtype=torch.long), window])
            places = 1 + torch.randperm(rest - 1, generator=random)[: round(share * rest)]
            yield Gaps(ids[:prefix], ids[prefix:], places.sort().values)


def fill(transformer: Transformer, items: list[Gaps], depth: int) -> Tensor:
    """Log-probabilities of all tokens in every gap of all items, with the prefix reused in `depth` layers."""
    shift, found = int(transformer.config.shifted), []
    for item in items:
        states = PrefixStates(item.prefix_P)
        states.deepen(transformer, depth)
        tokens_N = item.text_N.clone()
        tokens_N[item.gaps] = transformer.config.mask_token
        positions = torch.arange(len(tokens_N)) + len(item.prefix_P)
        rows = Rows(
            tokens_N=tokens_N,
            positions_N=positions,
            prefix=states.join(transformer, depth),
            wanted=item.gaps - shift,
        )
        logits = transformer.logits(transformer.run([rows])[0].hidden_ND)
        logits[:, transformer.config.mask_token] = -torch.inf
        found.append(logits.log_softmax(-1))
    return torch.cat(found)
