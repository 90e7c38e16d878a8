"""Where an answer ends."""

from __future__ import annotations

from collections.abc import Container, Sequence
from enum import Enum
from typing import Any


class Ending(Enum):
    """Why it does."""

    STOP = "stop"
    LENGTH = "length"


def find_end(
    params: Any, ends: Container[int], tokens: Sequence[int], before: int, last: bool
) -> tuple[Ending | None, int, int | None]:
    """Look for the end of an answer in a finished block.

    Args:
        params: vLLM's `SamplingParams`.
        ends: the model's own end tokens.
        tokens: of the block.
        before: how many tokens the answer had before it.
        last: whether the runtime is done with the request.

    Returns:
        Why the answer ends in this block (None: it goes on), how many of its tokens belong to the answer, and the
        stop token that is to be reported, if any.
    """
    stops = set(params.stop_token_ids or ())
    for place, token in enumerate(tokens):
        if before + place + 1 <= params.min_tokens:
            continue
        if not params.ignore_eos and (token == params.eos_token_id or token in ends):
            return Ending.STOP, place + 1, None
        if token in stops:
            return Ending.STOP, place + 1, token
    return (Ending.LENGTH if last else None), len(tokens), None
