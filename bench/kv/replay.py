"""A serving trace against a real pool: look up, load what is there, store what is not."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from forebay.bench.kv.session import BenchError, Memory2D
from forebay.bench.kv.simulate import HitRate
from forebay.bench.kv.trace import BLOCK_TOKENS, Request, block_key
from forebay.storage.config import PoolConfig
from forebay.storage.lanes import open_lane
from forebay.storage.namespace import Namespace
from forebay.storage.plan import TransferResult
from forebay.storage.pool import Lookup, Pool

NAMESPACE = Namespace(model="trace", weights="none")
MEMORY_BYTES = 512 << 20
"""Most memory on either side, for loads and for stores (our choice): longer loads go in several pieces."""


@dataclass(slots=True)
class Replayed:
    """What a replay did."""

    hits: HitRate = field(default_factory=HitRate)
    latencies: list[float] = field(default_factory=list)
    """Seconds from lookup to the last stripe, of every request that found something."""
    loaded_bytes: int = 0
    load_seconds: float = 0.0
    device_bytes: dict[str, int] = field(default_factory=dict)
    """Loaded from each device."""
    failed_loads: int = 0
    lateness: float = 0.0
    """How far the replay fell behind the trace's clock at worst (seconds); 0 when it did not keep to it."""

    def percentiles(self) -> dict[str, float]:
        """Of the latencies, in seconds."""
        if not self.latencies:
            return {}
        values = np.percentile(self.latencies, (50, 90, 99, 100))
        return dict(zip(("p50", "p90", "p99", "max"), map(float, values), strict=True))


class Replay:
    """A pool that a trace is replayed against, as a context manager.

    Args:
        config: the pool; what it holds of an earlier replay counts as there.
        kv_bytes_per_token: one chunk is a block of 512 tokens.
        longest: blocks of the longest request.
    """

    def __init__(self, config: PoolConfig, kv_bytes_per_token: int, longest: int) -> None:
        self.chunk = kv_bytes_per_token * BLOCK_TOKENS
        rows = max(1, min(longest, MEMORY_BYTES // self.chunk))
        self._target, self._source = Memory2D(rows, self.chunk), Memory2D(rows, self.chunk)
        self.pool = Pool.open(config, NAMESPACE)
        try:
            self._engine = open_lane(config)
        except BaseException:
            self.pool.close()
            raise
        for memory in (self._target, self._source):
            self._engine.register(memory.address, rows * self.chunk)
        self._transfer = 0
        self._limit = config.max_pending_store // 2
        self.result = Replayed()

    def __enter__(self) -> Replay:
        return self

    def __exit__(self, *exception: object) -> None:
        self._engine.close()
        self.pool.close()

    def run(self, requests: Sequence[Request], speed: float = 0.0, step: Callable[[], None] = lambda: None) -> Replayed:
        """Replay the requests one after the other.

        Args:
            requests: in order of arrival.
            speed: 1 keeps to the trace's clock, 10 runs ten times as fast, 0 as fast as loads and stores go. Only at 0
                are stores waited for; otherwise what does not fit into `max_pending_store` is dropped, as in service.
            step: called after every request.
        """
        started = time.monotonic()
        for request in requests:
            if speed:
                self._keep_pace(started + (request.arrival - requests[0].arrival) / speed)
            self._serve(request, wait_for_stores=not speed)
            step()
        self._drain()
        return self.result

    def _serve(self, request: Request, *, wait_for_stores: bool) -> None:
        keys = [block_key(block) for block in request.blocks]
        started = time.monotonic()
        hits = self._leading_hits(keys, wait_for_stores)
        loaded = self._load(keys[:hits], request.blocks[:hits])
        if hits:
            self.result.latencies.append(time.monotonic() - started)
        self.result.hits.count(request, loaded)
        self._store(keys[hits:], request.blocks[hits:], wait_for_stores)

    def _leading_hits(self, keys: Sequence[bytes], wait_for_stores: bool) -> int:
        for index, key in enumerate(keys):
            found = self.pool.lookup(key)
            if found is Lookup.WRITING and wait_for_stores:
                self._drain()
                found = self.pool.lookup(key)
            if found is not Lookup.READY:
                return index
        return len(keys)

    def _load(self, keys: Sequence[bytes], blocks: Sequence[int]) -> int:
        """Load a prefix, in pieces if memory is short. Returns how many leading blocks arrived and are right."""
        rows = self._target.rows
        for start in range(0, len(keys), rows):
            piece = keys[start : start + rows]
            plans = self.pool.prepare_load(piece)
            transfer = self._next()
            chunks = [(plan, self._target.row(row)) for row, plan in enumerate(plans)]
            self._engine.submit_load(transfer, chunks)
            result = self._wait(transfer)
            self.pool.complete_load(piece, result.failed)
            self._note(result)
            if result.failed or len(plans) < len(piece):
                self.result.failed_loads += len(result.failed)
                bad = next((row for row, key in enumerate(piece) if key in result.failed), len(plans))
                return start + bad
            self._target.expect([block % self._source.rows for block in blocks[start : start + rows]])
        return len(keys)

    def _store(self, keys: Sequence[bytes], blocks: Sequence[int], wait: bool) -> None:
        """Start storing; every block has its row, and the rows never change."""
        step = max(1, self._limit // self.chunk) if wait else max(1, len(keys))
        for start in range(0, len(keys), step):
            if wait:  # what is being written cannot be evicted: others would go in its place
                self._drain()
            plans = self.pool.prepare_store(keys[start : start + step], (self.chunk,))
            rows = dict(zip(keys, blocks, strict=True))
            chunks = [(plan, self._source.row(rows[plan.key] % self._source.rows)) for plan in plans]
            if chunks:
                self._engine.submit_store(self._next(), chunks)
        self._take(self._engine.poll())

    def _keep_pace(self, due: float) -> None:
        """Wait until it is time, tending to stores meanwhile."""
        while (left := due - time.monotonic()) > 0:
            if self._engine.pending():
                self._take(self._engine.wait(timeout=min(left, 0.01)))
            else:
                time.sleep(left)
        self.result.lateness = max(self.result.lateness, -left)

    def _wait(self, transfer: int) -> TransferResult:
        results = self._engine.wait([transfer])
        self._take(result for result in results if result.transfer != transfer)
        return next(result for result in results if result.transfer == transfer)

    def _drain(self) -> None:
        self._take(self._engine.wait())

    def _take(self, results: Any) -> None:
        """Publish what has been stored."""
        for result in results:
            self.pool.complete_store({key: [lane] for key, lane in result.checksums.items()}, result.failed)

    def _note(self, result: TransferResult) -> None:
        self.result.loaded_bytes += result.bytes
        self.result.load_seconds += result.seconds
        for name, count in result.device_bytes.items():
            self.result.device_bytes[name] = self.result.device_bytes.get(name, 0) + count

    def _next(self) -> int:
        self._transfer += 1
        return self._transfer


def check_fits(config: PoolConfig, kv_bytes_per_token: int) -> None:
    """Raise unless a chunk fits into the pool at all.

    Raises:
        BenchError: it does not.
    """
    chunk = kv_bytes_per_token * BLOCK_TOKENS
    room = sum(device.size or chunk for device in config.devices)
    if room < 2 * chunk:
        raise BenchError(
            f"a chunk of {BLOCK_TOKENS} tokens is {chunk} bytes and the pool has {room}; give a larger --capacity"
        )
