"""The vLLM connector: the offloading connector with the pool behind it, and with failures it can survive."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, PromMetric, PromMetricT
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.forward_context import ForwardContext
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from forebay.storage.namespace import weights_fingerprint
from forebay.storage.plan import DeviceHealth, TransferResult
from forebay.vllm_ext.manager import ForebayManager
from forebay.vllm_ext.metadata import ForebayConnectorMetadata, ForebayWorkerMetadata, JobReport
from forebay.vllm_ext.plugin import register
from forebay.vllm_ext.pool_config import read_pool_config
from forebay.vllm_ext.spec import WEIGHTS_KEY, ForebaySpec
from forebay.vllm_ext.steps import StepTimer
from forebay.vllm_ext.worker import ForebayWorker
from forebay.vllm_ext.worth import LoadJudge

logger = logging.getLogger(__name__)

IDLE_REST = 0.001
"""Seconds that a step without a forward pass leaves the CPU to the I/O threads while loads are on their way (our
choice: vLLM would step thousands of times meanwhile, on the cores that copy and verify)."""


class ForebayConnector(OffloadingConnector):
    """Serves warm prefixes from the striped KV pool.

    `--kv-transfer-config '{"kv_connector": "ForebayConnector", "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"pool": "pool.yaml"}}'`
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        _complete(vllm_config)
        config = build_offloading_config(vllm_config, kv_cache_config)
        self._canonical_layout = config.canonical_layout
        spec = OffloadingSpecFactory.create_spec(config)
        assert isinstance(spec, ForebaySpec)
        self.connector_scheduler = None
        self.connector_worker = None
        if role == KVConnectorRole.SCHEDULER:
            _check_failure_policy(vllm_config)
            self.connector_scheduler = ForebayConnectorScheduler(spec, vllm_config, kv_cache_config)
        else:
            self.connector_worker = ForebayConnectorWorker(spec, vllm_config, kv_cache_config)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """No: nothing is loaded or saved layer by layer inside the forward pass."""
        return False

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Start this step's loads; without a forward pass the step has nothing to do but wait for them."""
        worker = self.connector_worker
        assert isinstance(worker, ForebayConnectorWorker)
        worker.idle_step = forward_context.attn_metadata is None
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Finished loads, and those of them that failed and cannot be told block by block."""
        _, received = self.get_finished(finished_req_ids)
        worker = self.connector_worker
        assert isinstance(worker, ForebayConnectorWorker)
        return KVConnectorTransferResults(finished_recving=received, failed_recving=worker.take_failed_requests())

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that a finished load left unfilled; vLLM recomputes them."""
        worker = self.connector_worker
        assert isinstance(worker, ForebayConnectorWorker)
        return worker.take_failed_blocks()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        """vLLM's offloading metrics together with the pool's."""
        _complete(vllm_config, fingerprint=False)
        return super().build_prom_metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


class ForebayConnectorScheduler(OffloadingConnectorScheduler):
    """vLLM's scheduler side, told about failures and checksums before it completes a job, and what is worth loading."""

    def __init__(self, spec: ForebaySpec, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(spec, vllm_config, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._judge: LoadJudge | None = None
        if spec.pool_config.load == "when_faster":
            recomputes = transfer is not None and transfer.kv_load_failure_policy == "recompute"
            self._judge = LoadJudge(self.pool_manager.pool, give_up=recomputes)
            self._timer = StepTimer(self._judge.cost)
            self.pool_manager.judge = self.pool_manager.metrics.judge = self._judge

    @property
    def pool_manager(self) -> ForebayManager:
        """The manager, with its own type."""
        assert isinstance(self.manager, ForebayManager)
        return self.manager

    def on_new_request(self, request: Request) -> None:
        """Bind a request with a LoRA adapter to the adapter's content."""
        if request.lora_request is not None:
            fingerprint = weights_fingerprint(request.lora_request.lora_path).encode()
            self.pool_manager.set_adapter(request.request_id, hashlib.sha256(fingerprint).digest()[:8])
        super().on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int, max_num_new_tokens: int | None = None
    ) -> tuple[int | None, bool]:
        """Tokens of the hit that are worth loading; None while that cannot be said.

        vLLM looks up again with a bound, since the end of a shorter hit has to be valid for every group of layers.
        """
        found, again = super().get_num_new_matched_tokens(request, num_computed_tokens, max_num_new_tokens), False
        while self._judge is not None and (hit := found[0]):
            status = self._req_status[request.request_id]
            keys = [
                [self.pool_manager.pool_key(key, status.req_context) for key in group.offload_keys]
                for group in status.group_states
            ]
            kept = self._judge.judge(status, keys, num_computed_tokens, hit, again=again)
            if kept is None:
                return None, False
            if kept == hit:
                break
            # With windows vLLM takes one token off the bound.
            bound = kept + (kept > 0 and bool(self._sliding_window_groups))
            found, again = super().get_num_new_matched_tokens(request, num_computed_tokens, bound), True
        return found

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """The request has its blocks: its load begins, if it has one."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if self._judge is not None and (verdict := self._judge.admit(request.request_id)):
            self.pool_manager.metrics.record_verdict(verdict)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Let the pool know what the workers report, then let vLLM complete the jobs."""
        metadata = connector_output.kv_connector_worker_meta
        if isinstance(metadata, ForebayWorkerMetadata):
            self.pool_manager.absorb(metadata, self._stale_job_threshold)
            self._store_again(metadata)
        if self._judge is not None:
            self._learn(self._judge, metadata if isinstance(metadata, ForebayWorkerMetadata) else None)
        super().update_connector_output(connector_output)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        """Plan this step's jobs; forget what belongs to requests that are gone."""
        metadata = super().build_connector_meta(scheduler_output)
        if scheduler_output.finished_req_ids:
            self.pool_manager.forget(self._req_status)
        if self._judge is None:
            return metadata
        if scheduler_output.finished_req_ids:
            self._judge.forget(self._req_status)
        requests = {name: status.req for name, status in self._req_status.items()}
        step = self._timer.scheduled(scheduler_output, requests, time.monotonic())
        return ForebayConnectorMetadata(**vars(metadata), probes=self._judge.take_probes(), step=step)

    def _learn(self, judge: LoadJudge, metadata: ForebayWorkerMetadata | None) -> None:
        """Note what loads, probes and the step took."""
        self._timer.ended(metadata.steps if metadata else (), time.monotonic())
        for result in metadata.loads if metadata else ():
            if job := self._jobs.get(result.transfer):
                judge.end(job.req_id, result)
        for result in metadata.probes if metadata else ():
            judge.end(-result.transfer, result)

    def _store_again(self, metadata: ForebayWorkerMetadata) -> None:
        """What failed to load will be recomputed: let it be stored once more.

        vLLM counts chunks that hit as stored, so it would leave the gap in the pool until another request finds it.
        """
        for job_id, report in metadata.reports.items():
            job = self._jobs.get(job_id)
            if job is None or job.is_store or not report.failed:
                continue
            request = self._req_status[job.req_id]
            for group in request.group_states:
                keys = (self.pool_manager.pool_key(key, request.req_context) for key in group.offload_keys)
                first = next((index for index, key in enumerate(keys) if key in report.failed), None)
                if first is not None:
                    group.next_stored_chunk_idx = min(group.next_stored_chunk_idx, first)


class ForebayConnectorWorker(OffloadingConnectorWorker):
    """vLLM's worker side, without its assertion that every transfer succeeds."""

    def __init__(self, spec: ForebaySpec, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(spec, vllm_config, kv_cache_config)
        self._connector_worker_meta: ForebayWorkerMetadata = ForebayWorkerMetadata()
        self._lane = spec.lane
        self._rank = spec.config.parallel.rank
        self._one_group = len(kv_cache_config.kv_cache_groups) == 1
        self._failed_blocks: set[int] = set()
        self._failed_requests: set[str] = set()
        self._told: list[DeviceHealth] = []
        self._probes = 0
        self.idle_step = False

    def start_kv_transfers(self, metadata: OffloadingConnectorMetadata) -> None:
        """Start this step's jobs and probes."""
        super().start_kv_transfers(metadata)
        if isinstance(metadata, ForebayConnectorMetadata):
            self._probes += len(metadata.probes)
            for probe in metadata.probes:
                self._pool_worker.submit_probe(probe)
            if metadata.step is not None:
                self._connector_worker_meta.steps.add(metadata.step)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Requests whose loads have ended, whether or not they succeeded."""
        received: set[str] = set()
        if self.idle_step and (self._load_jobs or self._probes):
            self._pool_worker.rest(IDLE_REST)
        for result in self._pool_worker.take_results():
            if result.transfer < 0:
                self._probes -= 1
                self._connector_worker_meta.probes.append(result)
                continue
            request = self._load_jobs.pop(result.transfer, None)
            if request is not None:
                self._end_load(result, request)
                received.add(request)
            self._report(result, is_load=request is not None)
        return set(), received

    def take_failed_blocks(self) -> set[int]:
        """Blocks that failed since the last call."""
        blocks, self._failed_blocks = self._failed_blocks, set()
        return blocks

    def take_failed_requests(self) -> set[str]:
        """Requests whose load failed since the last call, for models with several KV-cache groups."""
        requests, self._failed_requests = self._failed_requests, set()
        return requests

    def build_connector_worker_meta(self) -> ForebayWorkerMetadata | None:
        """What happened since the last call, None when nothing did."""
        metadata = self._connector_worker_meta
        self._add_health(metadata)
        if metadata.is_empty():
            return None
        self._connector_worker_meta = ForebayWorkerMetadata()
        return metadata

    @property
    def _pool_worker(self) -> ForebayWorker:
        assert isinstance(self.worker, ForebayWorker)
        return self.worker

    def _end_load(self, result: TransferResult, request: str) -> None:
        blocks = self._pool_worker.failed_blocks(result)
        if not blocks:
            return
        # Block ids are unique within a group only, so vLLM takes whole requests when there are several groups.
        if self._one_group:
            self._failed_blocks |= blocks
        else:
            self._failed_requests.add(request)

    def _report(self, result: TransferResult, *, is_load: bool) -> None:
        metadata = self._connector_worker_meta
        metadata.mark_completed(result.transfer)
        lanes = {key: {self._lane: checksums} for key, checksums in result.checksums.items()}
        if result.failed or lanes:
            metadata.reports[result.transfer] = JobReport(result.failed, result.late, lanes)
        stats = metadata.transfer_stats.load if is_load else metadata.transfer_stats.store
        stats.record(result.bytes, result.seconds)
        (metadata.loads if is_load else metadata.stores).append(result)

    def _add_health(self, metadata: ForebayWorkerMetadata) -> None:
        if self.worker is None:
            return
        health = self._pool_worker.engine.health()
        state = [report._replace(read_bandwidth=0.0) for report in health]
        if state != self._told or any(report.read_bandwidth for report in health):
            metadata.health[self._rank] = health
            self._told = state
        if metadata.completed_jobs:
            metadata.queue_depth = self._pool_worker.engine.queue_depths()


def _complete(vllm_config: VllmConfig, *, fingerprint: bool = True) -> None:
    """Fill in what the user need not write: the spec's name and the fingerprint of the weights."""
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    register()
    extra = transfer.kv_connector_extra_config
    extra["spec_name"] = "ForebaySpec"
    if fingerprint:
        read_pool_config(extra)
        extra.setdefault(WEIGHTS_KEY, _model_fingerprint(vllm_config))


def _check_failure_policy(vllm_config: VllmConfig) -> None:
    transfer = vllm_config.kv_transfer_config
    if transfer is not None and transfer.kv_load_failure_policy != "recompute":
        logger.warning(
            'kv_load_failure_policy is "%s": a request whose blocks cannot be read will fail; '
            'set "kv_load_failure_policy": "recompute" to have them recomputed',
            transfer.kv_load_failure_policy,
        )


def _model_fingerprint(vllm_config: VllmConfig) -> str:
    """The weights, and every setting of the model that changes what its KV blocks hold."""
    model = vllm_config.model_config
    settings = {
        "weights": weights_fingerprint(model.model),
        "revision": model.revision,
        "quantization": model.quantization,
        "config": model.hf_config.to_dict(),
        "cache_dtype": vllm_config.cache_config.cache_dtype,
    }
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()
