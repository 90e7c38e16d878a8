"""`forebay bench kv --trace`: what comes out of a replay or a simulation, ready for JSON."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from forebay.bench.kv.replay import Replay, check_fits
from forebay.bench.kv.simulate import HitRate, capacities, simulations
from forebay.bench.kv.trace import BLOCK_TOKENS, Request, read_trace, repeated_share
from forebay.bench.machine import describe_machine, source_commit
from forebay.bench.rig import require_space, terminated_as_exit
from forebay.storage.config import PoolConfig, load_config
from forebay.storage.policy import POLICIES

KV_BYTES_PER_TOKEN = 128 << 10
"""Of Llama-3.1-8B in bf16: 32 layers of 8 heads of 128, keys and values."""
SCALED_BYTES_PER_TOKEN = KV_BYTES_PER_TOKEN // 64
"""For replays with I/O on an ordinary machine; capacities scale alike."""
CAPACITY = 4 << 30
DRAM_SHARE = 4
"""One part in so many of the default pool is memory."""
LIMIT = 1000

Progress = Callable[[int, int], None]


def simulate_trace(
    trace: Path,
    *,
    kv_bytes_per_token: int = KV_BYTES_PER_TOKEN,
    capacity: int = 0,
    limit: int = 0,
    progress: Progress = lambda done, total: None,
) -> dict[str, Any]:
    """Hit rates of the whole trace under every policy, at `capacity` bytes or at several, without I/O."""
    requests = read_trace(trace, limit)
    sizes = capacities(requests, kv_bytes_per_token, capacity)
    runs = list(simulations(sizes, tuple(POLICIES)))
    rows = []
    for number, run in enumerate(runs):
        progress(number, len(runs))
        run.run(requests)
        size = {"capacity_blocks": run.capacity, "capacity_bytes": run.capacity * kv_bytes_per_token * BLOCK_TOKENS}
        rows.append({"policy": run.policy, **size, "evictions": run.evictions, **_rates(run.hits)})
    return _header("kv-trace-simulation", trace, requests, kv_bytes_per_token) | {"results": rows}


def replay_trace(
    trace: Path,
    *,
    work: Path,
    pool: Path | None = None,
    kv_bytes_per_token: int = SCALED_BYTES_PER_TOKEN,
    capacity: int = CAPACITY,
    limit: int = LIMIT,
    speed: float = 0.0,
    progress: Progress = lambda done, total: None,
) -> dict[str, Any]:
    """Replay a trace against a pool, by default a temporary one of memory and one file in `work`.

    Raises:
        ConfigError, RigError, DeviceError, PoolError, BenchError: the trace or the pool cannot be used.
    """
    requests = read_trace(trace, limit)
    longest = max(len(request.blocks) for request in requests)
    with terminated_as_exit(), _pool(work, pool, capacity) as config:
        check_fits(config, kv_bytes_per_token)
        with Replay(config, kv_bytes_per_token, longest) as replay:
            started = time.monotonic()
            done = iter(range(1, len(requests) + 1))
            result = replay.run(requests, speed, lambda: progress(next(done), len(requests)))
            seconds = time.monotonic() - started
            stats = replay.pool.stats()
    return _header("kv-trace-replay", trace, requests, kv_bytes_per_token) | {
        **_rates(result.hits),
        "speed": speed,
        "lateness_seconds": result.lateness,
        "capacity_bytes": sum(device.capacity_bytes for device in stats.devices),
        "policy": config.policy,
        "placement": config.placement,
        "load_latency_seconds": result.percentiles(),
        "loads": len(result.latencies),
        "loaded_bytes": result.loaded_bytes,
        "loaded_bytes_by_device": result.device_bytes,
        "load_bandwidth": {"value": result.loaded_bytes / max(result.load_seconds, 1e-9), "unit": "B/s"},
        "stored_chunks": stats.stored,
        "dropped_stores": stats.dropped_stores,
        "failed_loads": result.failed_loads,
        "evictions": stats.evictions,
        "demotions": stats.demotions,
        "seconds": seconds,
        "machine": describe_machine(work),
    }


def _header(name: str, trace: Path, requests: Sequence[Request], kv_bytes_per_token: int) -> dict[str, Any]:
    return {
        "benchmark": name,
        "trace": trace.name,
        "requests": len(requests),
        "kv_bytes_per_token": kv_bytes_per_token,
        "chunk_bytes": kv_bytes_per_token * BLOCK_TOKENS,
        "repeated_blocks": repeated_share(requests),
        "commit": source_commit(),
        "ok": True,
    }


def _rates(hits: HitRate) -> dict[str, Any]:
    return {"hit_rate_blocks": hits.by_block, "hit_rate_tokens": hits.by_token, "blocks": hits.blocks}


@contextlib.contextmanager
def _pool(work: Path, pool: Path | None, capacity: int) -> Iterator[PoolConfig]:
    """The given pool, or a temporary one of `capacity` bytes."""
    if pool is not None:
        yield load_config(pool)
        return
    memory = capacity // DRAM_SHARE
    require_space(work, capacity - memory)
    folder = Path(tempfile.mkdtemp(prefix="forebay-bench-", dir=work)).resolve()
    devices = [
        {"name": "memory", "kind": "dram", "size": memory},
        {"name": "disk", "kind": "file", "size": capacity - memory, "path": folder / "disk.kv"},
    ]
    try:
        yield load_config({"path": folder / "pool", "durable": False, "devices": devices}, env={})
    finally:
        shutil.rmtree(folder, ignore_errors=True)
