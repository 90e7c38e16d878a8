"""Timing vLLM's steps on the scheduler's side: what computing a prompt costs here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from forebay.storage.prefill import PrefillCost, pairs

SAMPLED = 16
"""Of the steps that compute no prompt, one in so many is timed: they only tell the overhead of a step (our choice)."""


class StepTimer:
    """Feeds a `PrefillCost` with the steps that mostly compute prompts.

    A step counts from when it was scheduled, or from the end of the one before if that was later: with asynchronous
    scheduling steps are planned while others run. Its number travels with it to a worker and back.
    """

    def __init__(self, cost: PrefillCost) -> None:
        self._cost = cost
        self._number = 0
        self._open: dict[int, tuple[float, int, float, bool]] = {}
        """By number: when it was scheduled, tokens, pairs, whether it computes prompts."""
        self._last_end = 0.0

    def scheduled(self, output: SchedulerOutput, requests: Mapping[str, Request], now: float) -> int | None:
        """The number of this step if it is to be timed.

        Args:
            output: what the step computes.
            requests: by id, as they were before the step.
            now: seconds of a monotonic clock.
        """
        self._number += 1
        tokens = prompt = 0
        attended = 0.0
        for name, count in output.num_scheduled_tokens.items():
            request = requests.get(name)
            if request is None:
                return None
            start = request.num_computed_tokens
            tokens += count
            attended += pairs(start, start + count)
            prompt += max(0, min(count, request.num_prompt_tokens - start))
        if not tokens or not (2 * prompt > tokens or (not prompt and self._number % SAMPLED == 0)):
            return None
        self._open[self._number] = (now, tokens, attended, prompt > 0)
        return self._number

    def ended(self, numbers: Iterable[int], now: float) -> None:
        """A step is over; `numbers` has its number if it was timed."""
        for number in numbers:
            if (step := self._open.pop(number, None)) is None:
                continue
            scheduled, tokens, attended, has_prompt = step
            seconds = now - max(scheduled, self._last_end)
            if has_prompt:
                self._cost.observe(tokens, attended, seconds)
            else:
                self._cost.observe_empty(seconds)
        self._last_end = now
