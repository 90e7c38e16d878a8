"""How many forward passes the workers make before they come back.

Each return costs a round trip between processes, which matters for small models, and each pass without one keeps
requests waiting that came or were aborted meanwhile. So: as many as take about 20 ms (our choice: below what a client
notices), measured, and one at least. The scheduler says the number so that all ranks agree on it.
"""

from __future__ import annotations

import time

PERIOD = 0.02
"""Seconds."""
MOST = 16


class Pace:
    """Measures steps."""

    def __init__(self) -> None:
        self.passes = 1
        self._started = 0.0

    def start(self) -> None:
        """A step begins."""
        self._started = time.monotonic()

    def end(self, passes: int) -> None:
        """A step of so many passes has ended."""
        if passes:
            seconds = max(1e-6, (time.monotonic() - self._started) / passes)
            self.passes = max(1, min(MOST, int(PERIOD / seconds)))
