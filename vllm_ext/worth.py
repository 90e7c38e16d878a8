"""The scheduler's side of "is it worth loading?": what a hit would read, what was measured, and what to try."""

from __future__ import annotations

import math
import time
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import RequestOffloadState

from forebay.storage.plan import ChunkReads, LoadPlan, Span, TransferResult, pack, unpack
from forebay.storage.pool import Pool
from forebay.storage.prefill import PrefillCost
from forebay.storage.rates import ReadRates
from forebay.storage.worth import cumulate, load_seconds, shortest, within

UNMEASURED = 1.0
"""Seconds that a load may take while the engine has not computed anything yet (our choice): a restarted engine finds
its prefixes warm, and from what it computes otherwise it learns."""
LEAST_PATIENCE = 0.1
"""Seconds that a load is left alone in any case (our choice: well above the jitter of a busy machine)."""
PROBE_BYTES = 128 << 10
"""Longest read that only asks how fast a device is (our choice: a tenth of a second at 1 MB/s)."""
PROBE_PERIOD = 5.0
"""Seconds without a word from a device after which what is known of it is too old (our choice)."""
PROBE_WAIT = 1.0
"""Seconds that a request waits for an answer at most (our choice; it takes one step of the engine)."""

CANDIDATES = 128
"""Lengths of a hit that are compared at most: of 1,000 chunks every eighth (our choice: a millisecond)."""


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
        self._asked: dict[int, float] = {}
        """When each device was last sent a probe."""
        self._asking: dict[int, int] = {}
        """Devices with a probe on its way: its number."""
        self._probe_count = 0

    def bandwidths(self) -> list[float]:
        """Bytes per second that each device delivers to one lane now."""
        return self.rates.bandwidths(self._profile())

    def judge(
        self, status: RequestOffloadState, keys: Sequence[Sequence[bytes]], start: int, hit: int, *, again: bool = False
    ) -> int | None:
        """Tokens of the hit to load; None while a device has to say first how fast it is.

        Args:
            status: vLLM's state of the request.
            keys: by group, the pool's keys of all its chunks.
            start: tokens that the engine has.
            hit: tokens beyond them that the pool has.
            again: whether this is what is left of a hit that was trimmed a moment ago.
        """
        name, known = status.req.request_id, self.cost.known
        ends, loads, chunks = self._loads(status, keys, start, hit)
        computes = [self.cost.seconds(end, status.req.num_tokens) for end in ends]
        queued, bandwidths = self.rates.queued, self.bandwidths()
        loading = [load_seconds(load, queued, bandwidths) for load in loads]
        best = 0 if name in self._given_up else shortest(loading, computes) if known else within(loading, UNMEASURED)
        waiting = self._ask_silent(loads[-1], chunks, time.monotonic())
        if any(loads[best][device] for device in waiting):
            return None
        whole = self._verdicts.get(name) if again else None
        if whole is None:
            whole = Verdict(hit, 0, loading[-1], computes[0] - computes[-1] if known else None, math.inf)
        kept = ends[best] - start
        patience = max(LEAST_PATIENCE, computes[0] - computes[best] if known else UNMEASURED)
        self._verdicts[name] = replace(whole, kept=kept, patience=patience if self._give_up else math.inf)
        return kept

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
        self._asking = {device: number for device, number in self._asking.items() if number != load}

    def take_probes(self) -> list[LoadPlan]:
        """Reads to send with this step: one stripe each, to nowhere. Their keys are their numbers."""
        probes, self._probes = self._probes, []
        return probes

    def forget(self, live: Container[str]) -> None:
        """Forget all requests but these."""
        self._verdicts = {name: verdict for name, verdict in self._verdicts.items() if name in live}
        self._given_up = {name for name in self._given_up if name in live}

    def reset(self) -> None:
        """All loads on their way are void."""
        self.rates.clear()

    def _profile(self) -> list[float]:
        return [weight / self._pool.lanes for weight in self._pool.profile.weights()]

    def _loads(
        self, status: RequestOffloadState, keys: Sequence[Sequence[bytes]], start: int, hit: int
    ) -> tuple[list[int], list[list[int]], list[ChunkReads]]:
        """Where a load may end (tokens), the bytes by device that it then reads, and all chunks of the hit."""
        groups = status.config.kv_group_configs
        step = max(group.tokens_per_chunk for group in groups)
        step *= -(-hit // (step * CANDIDATES))
        ends = [start, *range((start // step + 1) * step, start + hit, step), start + hit]
        loads = [[0] * len(self._index) for _ in ends]
        found: list[ChunkReads] = []
        for group, group_keys in zip(groups, keys, strict=True):
            size, window = group.tokens_per_chunk, group.sliding_window_size_in_chunks
            first = start // size
            chunks = self._pool.reads(group_keys[first : -(-(start + hit) // size)])
            found += chunks
            upto = [0, *(min(-(-end // size) - first, len(chunks)) for end in ends[1:])]
            after = [0 if window is None else max(0, count - window) for count in upto]
            totals = cumulate(chunks, upto + after, len(self._index))
            for load, last, skipped in zip(loads, upto, after, strict=True):
                for device, (more, less) in enumerate(zip(totals[last], totals[skipped], strict=True)):
                    load[device] += more - less
        return ends, loads, found

    def _ask_silent(self, wanted: Sequence[int], chunks: Sequence[ChunkReads], now: float) -> list[int]:
        """Ask the devices of a hit that nobody has heard of lately; those whose answer is still waited for.

        Who would load from such a device waits: it may have become slow. Who would not does not wait: it may have
        become fast, which is good to know next time.
        """
        for device, count in enumerate(wanted):
            heard = max(self.rates.seen(device) or -math.inf, self._asked.get(device, -math.inf))
            if count and device not in self._asking and now - heard > PROBE_PERIOD:
                self._ask(device, chunks, now)
        return [device for device in self._asking if now - self._asked[device] < PROBE_WAIT]

    def _ask(self, device: int, chunks: Sequence[ChunkReads], now: float) -> None:
        """Have one stripe of the chunks read, another one each time: what was just read is in somebody's cache."""
        stripes = [
            (place, span.length)
            for places, spans in chunks
            for place, span in zip(unpack(places), spans, strict=True)
            if place >> 32 == device
        ]
        place, length = stripes[self._probe_count % len(stripes)]
        self._probe_count += 1
        length = min(length, PROBE_BYTES)
        self.rates.start(self._probe_count, {device: length})
        self._asking[device], self._asked[device] = self._probe_count, now
        key = self._probe_count.to_bytes(8, "big")
        self._probes.append(LoadPlan(key, (Span(0, length),), pack([place]), b"", verify=False))
