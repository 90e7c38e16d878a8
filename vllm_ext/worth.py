"""The scheduler's side of "is it worth loading?": what a hit would read, what was measured, and what to try."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import RequestOffloadState

from forebay.storage.plan import LoadPlan, Span, TransferResult, pack, unpack
from forebay.storage.pool import Pool
from forebay.storage.prefill import PrefillCost
from forebay.storage.rates import ReadRates
from forebay.storage.worth import choose, cumulate, load_seconds

UNMEASURED = 1.0
"""Seconds that a load may take while the engine has not computed anything yet (our choice): a restarted engine finds
its prefixes warm, and from what it computes otherwise it learns."""
LEAST_PATIENCE = 0.1
"""Seconds that a load is left alone in any case (our choice: well above the jitter of a busy machine)."""
PROBE_BYTES = 128 << 10
"""Longest read that only asks how fast a device is (our choice: a tenth of a second at 1 MB/s)."""
PROBE_PERIOD = 10.0
"""Seconds without a word from a device after which it is asked again, if loads were turned down (our choice)."""
PROBE_WAIT = 1.0
"""Seconds that a request waits for the first answer of a device at most (our choice; an answer takes one step)."""

Stripe = tuple[int, int, int]
"""Place, offset in its chunk, bytes."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was decided about the hit of one request."""

    hit: int
    """Tokens in the pool beyond what the engine has."""
    kept: int
    """Tokens of them that are loaded."""
    load_seconds: float
    """Estimate for loading all of the hit."""
    compute_seconds: float | None
    """Estimate for computing all of it; None when nothing was measured yet."""
    patience: float
    """Seconds after which the load is given up."""


class LoadJudge:
    """Decides how much of a hit is loaded, and learns from what loads and steps take.

    Args:
        pool: where the chunks are.
        give_up: whether a load may end early: only where vLLM recomputes what failed to load.
    """

    def __init__(self, pool: Pool, *, give_up: bool) -> None:
        self.cost = PrefillCost()
        self.rates = ReadRates(len(pool.config.devices))
        self._pool = pool
        self._give_up = give_up
        self._index = {device.name: index for index, device in enumerate(pool.config.devices)}
        self._verdicts: dict[str, Verdict] = {}
        """The last about each request that has not got its blocks yet."""
        self._given_up: set[str] = set()
        """Requests that have waited for the pool in vain; they get nothing from it any more."""
        self._probes: list[LoadPlan] = []
        """To be sent with the next step."""
        self._asked: dict[int, tuple[int, float]] = {}
        """Number of the probe on its way to a device, and since when."""
        self._probe_count = 0

    def bandwidths(self) -> list[float]:
        """Bytes per second that each device delivers to one lane now."""
        return self.rates.bandwidths(self._profile())

    def judge(self, status: RequestOffloadState, keys: Sequence[Sequence[bytes]], start: int, hit: int) -> int | None:
        """Tokens of the hit to load; None while a device has to say first how fast it is.

        Args:
            status: vLLM's state of the request.
            keys: by group, the pool's keys of all its chunks.
            start: tokens that the engine has.
            hit: tokens beyond them that the pool has.
        """
        name, total = status.req.request_id, status.req.num_tokens
        ends, loads, stripes = self._loads(status, keys, start, hit)
        now = time.monotonic()
        if self._wait_for_probes(loads[-1], stripes, now):
            return None
        queued, bandwidths = self.rates.queued, self.bandwidths()
        computes = [self.cost.seconds(end, total) for end in ends]
        if name in self._given_up:
            best = 0
        elif self.cost.known:
            best = choose(loads, computes, queued, bandwidths)
        else:
            quick = [load_seconds(load, queued, bandwidths) <= UNMEASURED for load in loads]
            best = max(k for k, fits in enumerate(quick) if fits)
        saved = computes[0] - computes[best] if self.cost.known else UNMEASURED
        self._verdicts[name] = Verdict(
            hit,
            ends[best] - start,
            load_seconds(loads[-1], queued, bandwidths),
            computes[0] - computes[-1] if self.cost.known else None,
            max(LEAST_PATIENCE, saved) if self._give_up else math.inf,
        )
        if ends[best] < start + hit:
            self._ask_again(loads[-1], stripes, now)
        return ends[best] - start

    def admit(self, request: str) -> Verdict | None:
        """The last verdict about a request that now has its blocks; None when there was no hit."""
        return self._verdicts.pop(request, None)

    def begin(self, request: str, plans: Iterable[LoadPlan]) -> float:
        """The load of a request begins; seconds after which it is to be given up."""
        wanted: dict[int, int] = {}
        for plan in plans:
            for place, span in zip(unpack(plan.places), plan.spans, strict=True):
                wanted[place >> 32] = wanted.get(place >> 32, 0) + span.length
        self.rates.start(request, wanted)
        verdict = self._verdicts.get(request)
        return math.inf if verdict is None else verdict.patience

    def end(self, load: str | int, result: TransferResult) -> None:
        """A load (by request) or a probe (by its number) has ended on some rank."""
        arrived = {self._index[name]: count for name, count in result.device_bytes.items()}
        seconds = {self._index[name]: took for name, took in result.device_seconds.items()}
        now = time.monotonic()
        self.rates.finish(load, arrived, seconds, self._profile(), now)
        if isinstance(load, str) and result.late:
            self._given_up.add(load)
        self._asked = {device: asked for device, asked in self._asked.items() if asked[0] != load}

    def take_probes(self) -> list[LoadPlan]:
        """Reads to send with this step: one stripe each, to nowhere. Their keys are their numbers."""
        probes, self._probes = self._probes, []
        return probes

    def forget(self, requests: Iterable[str]) -> None:
        """Forget requests that have ended."""
        for name in requests:
            self._verdicts.pop(name, None)
            self._given_up.discard(name)

    def reset(self) -> None:
        """All loads on their way are void."""
        self.rates.clear()

    def _profile(self) -> list[float]:
        return [weight / self._pool.lanes for weight in self._pool.profile.weights()]

    def _loads(
        self, status: RequestOffloadState, keys: Sequence[Sequence[bytes]], start: int, hit: int
    ) -> tuple[list[int], list[list[int]], list[Stripe]]:
        """Where a load may end (tokens), the bytes by device that it then reads, and all stripes of the hit."""
        groups = status.config.kv_group_configs
        step = max(group.tokens_per_chunk for group in groups)
        ends = [start, *range((start // step + 1) * step, start + hit, step), start + hit]
        devices = len(self._index)
        loads = [[0] * devices for _ in ends]
        stripes: list[Stripe] = []
        for group, group_keys in zip(groups, keys, strict=True):
            size, window = group.tokens_per_chunk, group.sliding_window_size_in_chunks
            first, last = start // size, -(-(start + hit) // size)
            chunks = self._pool.reads(group_keys[first:last])
            stripes += [stripe for chunk in chunks for stripe in chunk]
            totals = cumulate(map(_by_device, chunks), devices)
            for load, end in zip(loads[1:], ends[1:], strict=True):
                upto = min(-(-end // size) - first, len(chunks))
                after = 0 if window is None else max(0, upto - window)
                for device in range(devices):
                    load[device] += totals[upto][device] - totals[after][device]
        return ends, loads, stripes

    def _wait_for_probes(self, wanted: Sequence[int], stripes: Sequence[Stripe], now: float) -> bool:
        """Ask the devices of a hit that have never been read; whether an answer is still out."""
        waiting = False
        for device, count in enumerate(wanted):
            if count and self.rates.seen(device) is None:
                self._ask(device, stripes, now)
                waiting |= now - self._asked[device][1] < PROBE_WAIT
        return waiting

    def _ask_again(self, wanted: Sequence[int], stripes: Sequence[Stripe], now: float) -> None:
        """Ask the devices of a hit that was turned down and that have been silent for long: they may have recovered."""
        for device, count in enumerate(wanted):
            seen = self.rates.seen(device)
            if count and seen is not None and now - seen > PROBE_PERIOD:
                self._ask(device, stripes, now)

    def _ask(self, device: int, stripes: Sequence[Stripe], now: float) -> None:
        if device in self._asked:
            return
        mine = [stripe for stripe in stripes if stripe[0] >> 32 == device]
        place, _, length = mine[self._probe_count % len(mine)]
        self._probe_count += 1
        length = min(length, PROBE_BYTES)
        self.rates.start(self._probe_count, {device: length})
        self._asked[device] = (self._probe_count, now)
        key = self._probe_count.to_bytes(8, "big")
        self._probes.append(LoadPlan(key, (Span(0, length),), pack([place]), b"", verify=False))


def _by_device(stripes: Iterable[Stripe]) -> dict[int, int]:
    found: dict[int, int] = {}
    for place, _, length in stripes:
        found[place >> 32] = found.get(place >> 32, 0) + length
    return found
