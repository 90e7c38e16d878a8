"""vLLM's offloading scheduler and worker with the pool behind them, stepped without an engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor, make_offload_key
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from forebay.storage import lanes
from forebay.storage.config import PoolConfig
from forebay.storage.device.faulty import FaultyDevice
from forebay.storage.namespace import Namespace
from forebay.storage.pool import Pool
from forebay.vllm_ext.connector import ForebayConnectorScheduler, ForebayConnectorWorker
from forebay.vllm_ext.layout import ChunkLayout
from forebay.vllm_ext.manager import ForebayManager
from forebay.vllm_ext.worker import ForebayWorker

TOKENS, PAGE, BLOCKS = 16, 262_144, 64
"""Tokens of a block, its bytes, blocks in the engine."""


class Sides:
    """Both sides of the connector. Chunks are one block of one layer; the file devices can be made to fail.

    Args:
        folder: for the pool.
        windows: sliding window in tokens of each KV-cache group, None for full attention.
        policy: vLLM's `kv_load_failure_policy`.
        changes: to the pool's configuration.
    """

    def __init__(
        self, folder: Path, windows: Sequence[int | None] = (None,), policy: str = "recompute", **changes: Any
    ) -> None:
        file = {"kind": "file", "size": "48MiB", "buffered": True}
        devices = [{**file, "name": f"ssd{n}", "path": folder / f"{n}.kv"} for n in range(2)]
        fields = {"path": folder / "state", "stripe": "128KiB", "devices": devices, **changes}
        self.config = PoolConfig.model_validate(fields)
        self.pool = Pool.open(self.config, Namespace(model="m", weights="w"))
        self.groups = len(windows)
        cache = SimpleNamespace(kv_cache_groups=[_group(window) for window in windows])
        vllm = SimpleNamespace(
            cache_config=SimpleNamespace(enable_prefix_caching=True, prefix_cache_retention_interval=None),
            speculative_config=None,
            parallel_config=SimpleNamespace(world_size=1, decode_context_parallel_size=1),
            kv_transfer_config=SimpleNamespace(kv_load_failure_policy=policy),
        )
        spec: Any = _spec(self.config, ForebayManager(self.pool, (PAGE,)), self.groups)
        self.scheduler = ForebayConnectorScheduler(spec, vllm, cache)  # type: ignore[arg-type]
        self.side = ForebayConnectorWorker(spec, vllm, cache)  # type: ignore[arg-type]
        self.engine, self.faults = _open(self.config)
        tensor = torch.zeros((BLOCKS, PAGE), dtype=torch.int8)
        refs = [[CanonicalKVCacheRef(0, PAGE)] for _ in windows]
        caches = CanonicalKVCaches([CanonicalKVCacheTensor(tensor, PAGE)], refs)
        self.side.worker = ForebayWorker(self.engine, caches, ChunkLayout(caches, list(range(self.groups)), 1))
        self.tensor = tensor

    @property
    def judge(self) -> Any:
        return self.scheduler._judge

    @property
    def metrics(self) -> dict[str, Any]:
        found: dict[str, Any] = self.scheduler.pool_manager.metrics._stats.data["data"]
        return found

    def store(self, hashes: Sequence[bytes], groups: Sequence[int] = (0,)) -> None:
        """Put chunks of zeros into the pool."""
        keys = [make_offload_key(name, group) for group in groups for name in hashes]
        plans = self.pool.prepare_store(keys, (PAGE,))
        assert len(plans) == len(keys)
        self.engine.submit_store(1 << 40, [(plan, [(0, PAGE)]) for plan in plans])
        (result,) = self.engine.wait()
        self.pool.complete_store({key: [sums] for key, sums in result.checksums.items()}, result.failed)

    def ask(self, request: Any, limit: float = 5.0) -> int:
        """Tokens that the scheduler side offers, once it has made up its mind; steps until then."""
        if request.request_id not in self.scheduler._req_status:
            self.scheduler.on_new_request(request)
        end = time.monotonic() + limit
        while (found := self.scheduler.get_num_new_matched_tokens(request, 0)[0]) is None:
            assert time.monotonic() < end, "no decision"
            self.step()
        return found

    def load(self, request: Any, tokens: int, limit: float = 30.0) -> set[int]:
        """Load what was offered, stepping until it has ended; the blocks that failed."""
        blocks = [[_block(1 + n) for n in range(-(-request.num_tokens // TOKENS))] for _ in range(self.groups)]
        self.scheduler.update_state_after_alloc(request, SimpleNamespace(blocks=blocks), tokens)  # type: ignore[arg-type]
        end, failed = time.monotonic() + limit, set[int]()
        while self.scheduler._jobs:
            assert time.monotonic() < end, "the load did not end"
            failed |= self.step()
        return failed

    def step(self) -> set[int]:
        """One step of the engine without a forward pass; blocks that failed to load."""
        output = SchedulerOutput.make_empty()
        output.scheduled_cached_reqs = CachedRequestData.make_empty()
        metadata = self.scheduler.build_connector_meta(output)
        self.side.idle_step = True
        self.side.handle_preemptions(metadata)
        self.side.start_kv_transfers(metadata)
        self.side.prepare_store_kv(metadata)
        self.side.get_finished(set())
        failed = self.side.take_failed_blocks()
        report = self.side.build_connector_worker_meta()
        self.scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=report))
        return failed

    def hear(self) -> None:
        """Step until all devices that were asked have answered."""
        while self.judge._asking:
            self.step()

    def knows(self, seconds_per_token: float) -> None:
        """Let the engine have computed a prompt at this speed."""
        self.judge.cost.observe(1000, 0, 1000 * seconds_per_token)

    def throttle(self, rate: float) -> None:
        """Both devices deliver `rate` bytes per second each from now on."""
        for device in self.faults:
            device.clear()
            device.throttle(rate)

    def close(self) -> None:
        for device in self.faults:
            device.clear()
        self.engine.close()
        self.pool.close()


def request(name: str, hashes: Sequence[bytes], tail: int = 5) -> Any:
    """A prompt of whole blocks with these hashes and a tail, as far as the connector looks at it."""
    tokens = len(hashes) * TOKENS + tail
    return SimpleNamespace(
        request_id=name, block_hashes=list(hashes), num_tokens=tokens, num_prompt_tokens=tokens, num_computed_tokens=0,
        kv_transfer_params=None, kv_hints=None, lora_request=None, skip_reading_prefix_cache=False,
        is_finished=lambda: False, status=RequestStatus.RUNNING,
    )  # fmt: skip


def hashes(count: int, label: str = "h") -> list[bytes]:
    """Block hashes of a prompt."""
    return [f"{label}{number:031d}".encode() for number in range(count)]


def _group(window: int | None) -> Any:
    shape = {"block_size": TOKENS, "num_kv_heads": 1, "head_size": 64, "dtype": torch.float32}
    kind: Any = FullAttentionSpec(**shape) if window is None else SlidingWindowSpec(**shape, sliding_window=window)
    return SimpleNamespace(kv_cache_spec=kind, is_eagle_group=False, layer_names=["layer"])


def _spec(config: PoolConfig, manager: ForebayManager, groups: int) -> Any:
    parts = [SimpleNamespace(group_id=n, tokens_per_block=TOKENS, layer_names=["layer"]) for n in range(groups)]
    parallel = SimpleNamespace(rank=0, world_size=1)
    return SimpleNamespace(
        pool_config=config, get_manager=lambda: manager, blocks_per_chunk=1, tokens_per_hash=TOKENS,
        tokens_per_block=[TOKENS] * groups, offload_prompt_only=False, kv_events_config=_no_events(), lane=0,
        replicated_layout=False, config=SimpleNamespace(groups=parts, canonical_layout=False, parallel=parallel),
    )  # fmt: skip


def _no_events() -> Any:
    return SimpleNamespace(enable_kv_cache_events=False, self_describing_kv_events=False)


def _block(number: int) -> Any:
    return SimpleNamespace(block_id=number, is_null=False, block_hash=None)


def _open(config: PoolConfig) -> tuple[Any, list[FaultyDevice]]:
    faults: list[FaultyDevice] = []
    opened = lanes.open_device

    def open_faulty(*arguments: Any, **options: Any) -> FaultyDevice:
        faults.append(FaultyDevice(opened(*arguments, **options)))
        return faults[-1]

    lanes.open_device = open_faulty  # type: ignore[assignment]
    try:
        return lanes.open_lane(config), faults
    finally:
        lanes.open_device = opened
