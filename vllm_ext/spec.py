"""The offloading spec: builds the manager in the scheduler's process and the worker in each worker process."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
)
from vllm.v1.kv_offload.config import OffloadingConfig

from forebay.storage.errors import ConfigError
from forebay.storage.lanes import open_lane
from forebay.storage.namespace import Namespace, weights_fingerprint
from forebay.storage.pool import Pool
from forebay.storage.units import format_bytes
from forebay.vllm_ext import metrics
from forebay.vllm_ext.layout import ChunkLayout
from forebay.vllm_ext.manager import ForebayManager
from forebay.vllm_ext.plugin import log_like_vllm
from forebay.vllm_ext.pool_config import read_pool_config
from forebay.vllm_ext.staging import STAGING_BYTES, StagedWorker
from forebay.vllm_ext.worker import ForebayWorker

logger = logging.getLogger(__name__)

WEIGHTS_KEY = "forebay_weights"
"""Entry of the extra configuration in which the connector leaves the fingerprint of the model's weights."""


class ForebaySpec(OffloadingSpec):
    """`kv_connector_extra_config: {"pool": "pool.yaml"}`, or the pool's keys in place of the path."""

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        """The pool's Prometheus metrics."""
        return metrics.definitions()

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        log_like_vllm()
        if config.canonical_layout:
            raise ConfigError(
                "canonical_layout is not supported by the forebay pool; remove it from kv_connector_extra_config"
            )
        self.replicated_layout = config.replicated_layout
        self.pool_config = read_pool_config(
            config.extra_config, config.parallel.data_parallel_index, config.parallel.data_parallel_size
        )
        self.lanes = 1 if config.replicated_layout else config.parallel.world_size
        self.lane = 0 if config.replicated_layout else config.parallel.rank

    def get_manager(self) -> OffloadingManager:
        """Open the pool; called once, in the scheduler's process."""
        pool = Pool.open(self.pool_config, namespace(self.config), self.lanes)
        stats = pool.stats()
        logger.info(
            "forebay KV pool is live: %s over %d devices (%s), %d chunks warm, placement %s",
            format_bytes(sum(device.capacity_bytes for device in stats.devices)),
            len(stats.devices),
            ", ".join(f"{device.name} {format_bytes(device.capacity_bytes)}" for device in stats.devices),
            stats.chunks,
            self.pool_config.placement,
        )
        return ForebayManager(pool, self._segments())

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Open the devices; called once in each worker process."""
        shared = self.config.parallel.world_size > 1 and self.lanes == 1
        staged = kv_caches.tensors[0].tensor.is_cuda
        staging = STAGING_BYTES if staged else 0
        engine = open_lane(self.pool_config, self.lane, self.lanes, shared_memory=shared, staging=staging)
        layout = ChunkLayout(kv_caches, [group.group_id for group in self.config.groups], self.blocks_per_chunk)
        if staged:
            return StagedWorker(engine, kv_caches, layout)
        return ForebayWorker(engine, kv_caches, layout)

    def _segments(self) -> Sequence[int]:
        """Bytes of each striped segment of a chunk.

        vLLM's groups alias the same pages of one allocation, so every group's chunk has the size of a whole
        block of it; a group with smaller pages is padded (`ChunkLayout.memory`).
        """
        block = self.config.worker_kv_bytes_per_block
        layers = max(len(group.layer_names) for group in self.config.groups)
        groups = min(self.pool_config.layer_groups, layers)
        total = block * self.blocks_per_chunk
        if groups == 1:
            return (total,)
        per_layer = total // layers
        counts = [layers // groups + (index < layers % groups) for index in range(groups)]
        segments = [count * per_layer for count in counts]
        segments[-1] += total - sum(segments)
        return segments


def namespace(config: OffloadingConfig) -> Namespace:
    """What must be equal for one KV block to stand for another."""
    parallel = config.parallel
    return Namespace(
        model=config.model.name,
        weights=str(config.extra_config.get(WEIGHTS_KEY) or weights_fingerprint(config.model.name)),
        dtype=config.model.dtype,
        layout=config.kv_cache_layout or "",
        tokens_per_block=config.cache.tokens_per_hash,
        blocks_per_chunk=config.cache.blocks_per_chunk,
        tp=parallel.tp_size,
        pp=parallel.pp_size,
        pcp=parallel.pcp_size,
        dcp=parallel.dcp_size,
        groups=tuple(
            f"{group.group_id}:{group.tokens_per_block}:{','.join(group.layer_names)}" for group in config.groups
        ),
    )
