"""How long this engine computes a prompt: measured from its steps. No clock, no I/O."""

from __future__ import annotations

import math

HALF_LIFE = 32768
"""Tokens after which an observation counts half (our choice: a few long prompts). Tokens and not steps, so that many
small steps cannot drown a large one."""
ALIKE = 0.95
"""Squared correlation of tokens and pairs above which their costs cannot be told apart (our choice)."""
LEAST = 0.1
"""Part of a step that its tokens are held accountable for at least, however small it is (our choice)."""


def pairs(start: float, end: float) -> float:
    """Pairs of a token and one that it attends to, for tokens `start` to `end` of a sequence."""
    return (end * end - start * start) / 2


class PrefillCost:
    """Seconds of a step = overhead + tokens * a + pairs * b, by least squares with forgetting; nothing is negative.

    `a` is the work of the linear layers, `b` that of attention, which grows with the position. While what was seen
    cannot tell the two apart (prompts of one length, each in one step), everything is put down to the tokens. The
    overhead is the shortest step without a prompt: what every answer pays anyway.
    """

    def __init__(self) -> None:
        self.token_seconds = 0.0
        self.pair_seconds = 0.0
        self._overhead = math.inf
        self._t = self._p = self._tt = self._tp = self._pp = self._ty = self._py = 0.0

    @property
    def known(self) -> bool:
        """Whether anything was observed."""
        return self._tt > 0

    def observe_empty(self, seconds: float) -> None:
        """A step that had no prompt to compute took so long."""
        if 0 < seconds < self._overhead:
            self._overhead = seconds
            self._solve()

    def observe(self, tokens: float, attended: float, seconds: float) -> None:
        """A step of `tokens` tokens and `attended` pairs took so long."""
        if not (tokens > 0 and 0 < seconds < math.inf):
            return
        keep = 0.5 ** (tokens / HALF_LIFE)
        self._t = self._t * keep + tokens
        self._p = self._p * keep + attended
        self._tt = self._tt * keep + tokens * tokens
        self._tp = self._tp * keep + tokens * attended
        self._pp = self._pp * keep + attended * attended
        self._ty = self._ty * keep + tokens * seconds
        self._py = self._py * keep + attended * seconds
        self._solve()

    def seconds(self, start: float, end: float) -> float:
        """To compute tokens `start` to `end` of a prompt when those before are there. 0 when nothing is known."""
        return (end - start) * self.token_seconds + pairs(start, end) * self.pair_seconds

    def _solve(self) -> None:
        if not self.known:
            return
        overhead = self._overhead if self._overhead < math.inf else 0.0
        ty = max(self._ty - overhead * self._t, LEAST * self._ty)
        py = max(self._py - overhead * self._p, LEAST * self._py)
        self.token_seconds, self.pair_seconds = ty / self._tt, 0.0
        determinant = self._tt * self._pp - self._tp * self._tp
        if determinant <= (1 - ALIKE) * self._tt * self._pp:
            return
        tokens, attended = (ty * self._pp - py * self._tp), (py * self._tt - ty * self._tp)
        if tokens < 0:
            self.token_seconds, self.pair_seconds = 0.0, py / self._pp
        elif attended > 0:
            self.token_seconds, self.pair_seconds = tokens / determinant, attended / determinant
