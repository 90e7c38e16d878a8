"""How a model's chats look in tokens, learnt from its chat template alone.

Sentinel conversations that differ in one turn are compared: what they have in common around that turn is what the
template puts there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]
Render = Callable[[list[dict[str, str]]], Sequence[int]]
"""Messages with `role` and `content` -> the tokens of the prompt, as the model is served with them."""

CONTENTS = ("alpha", "Zulu 7", "(x).", "9 o'clock!")
"""Sentinels that have neither their first nor their last character in common."""
HARD = "Rules:\n\n1. user\n2. system: [assistant]\n\n\n### End\n</s> <user> \n\nuser: no.\n\n"
"""What a marker must not be mistaken for."""


@dataclass(frozen=True, slots=True)
class Markers:
    """Tokens that a chat template puts around contents; all empty where they tell nothing apart."""

    system: tuple[int, ...] = ()
    """What a prompt with a system turn begins with."""
    user: tuple[int, ...] = ()
    """What stands between the system turn's content and the user's."""
    turn: tuple[int, ...] = ()
    """What stands behind the content of every turn; may be empty."""

    def system_end(self, tokens_N: Tokens) -> int:
        """How many tokens the system turn takes, with the header of the user's turn; 0 where there is none."""
        first = len(self.system)
        if not first or tuple(tokens_N[:first]) != self.system:
            return 0
        for marker in (self.user, self.turn):  # the header is not there as it is where it merges with what follows
            ends = find_ends(tokens_N[first:], marker)
            if len(ends):
                return first + int(ends[0])
        return 0

    def boundaries(self, tokens_N: Tokens) -> Tokens:
        """Where turns end, ascending: numbers of leading tokens."""
        ends = find_ends(tokens_N, self.turn)
        return np.union1d(ends, [self.system_end(tokens_N)]).astype(np.int32)


def find_ends(tokens_N: Tokens, marker: Sequence[int]) -> Tokens:
    """Numbers of leading tokens that end with a marker, ascending; none for an empty one."""
    size = len(marker)
    if not size or len(tokens_N) < size:
        return np.empty(0, np.int32)
    hits = tokens_N[: len(tokens_N) - size + 1] == marker[0]
    for place, token in enumerate(marker[1:], 1):
        hits &= tokens_N[place : len(tokens_N) - size + 1 + place] == token
    return (np.flatnonzero(hits) + size).astype(np.int32)


def learn_markers(render: Render) -> Markers:
    """The markers of a chat template.

    Args:
        render: makes tokens of a conversation. What it raises for one with a system turn means that there are none.

    Returns:
        Empty markers where the template has no system turn, or marks it with what may stand in a text as well.
    """

    def prompt(system: str, user: str) -> list[int]:
        return list(render([{"role": "system", "content": system}, {"role": "user", "content": user}]))

    try:
        made = {pair: prompt(*pair) for pair in product(CONTENTS, CONTENTS)}
        hard = [prompt(HARD, user) for user in CONTENTS]
    except Exception:  # templates raise what they like
        return Markers()
    sample = made[CONTENTS[0], CONTENTS[0]]
    before = common(*made.values())
    until = common(*(made[CONTENTS[0], user] for user in CONTENTS))
    behind = common_end(*(made[system, CONTENTS[0]] for system in CONTENTS))
    user = sample[len(sample) - behind : until]
    rest = common_end(*made.values())
    turn = user[: common(user, sample[len(sample) - rest :])]
    found = Markers(tuple(sample[:before]), tuple(user), tuple(turn))
    right = common(*hard)
    return found if user and all(found.system_end(np.array(one, np.int32)) == right for one in hard) else Markers()


def common(*sequences: Sequence[int]) -> int:
    """How many tokens all of them begin with."""
    for place, tokens in enumerate(zip(*sequences, strict=False)):
        if len(set(tokens)) > 1:
            return place
    return min(map(len, sequences))


def common_end(*sequences: Sequence[int]) -> int:
    """How many tokens all of them end with."""
    return common(*(one[::-1] for one in sequences))
