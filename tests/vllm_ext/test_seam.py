"""The parts of vLLM that the plugin stands on. When one of these fails, vLLM has moved: read the message."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1 import offloading_connector
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import common, scheduler, worker
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.tiering import base as tiering
from vllm.v1.outputs import KVConnectorOutput

SIGNATURES: dict[Any, list[str]] = {
    base.OffloadingManager.lookup: ["self", "key", "req_context"],
    base.OffloadingManager.prepare_load: ["self", "keys", "req_context"],
    base.OffloadingManager.complete_load: ["self", "keys", "req_context"],
    base.OffloadingManager.prepare_store: ["self", "keys", "req_context"],
    base.OffloadingManager.complete_store: ["self", "keys", "req_context", "success"],
    base.OffloadingManager.get_load_source: ["self", "key", "req_context"],
    base.OffloadingWorker.submit_load: ["self", "job_id", "src_spec", "dst_spec"],
    base.OffloadingWorker.submit_store: ["self", "job_id", "src_spec", "dst_spec"],
    base.OffloadingWorker.wait: ["self", "job_ids"],
    base.OffloadingSpec.get_worker: ["self", "kv_caches"],
    base.GPULoadStoreSpec.__init__: ["self", "block_ids", "group_sizes", "block_indices"],
    scheduler.OffloadingConnectorScheduler.__init__: ["self", "spec", "vllm_config", "kv_cache_config"],
    scheduler.OffloadingConnectorScheduler.update_connector_output: ["self", "connector_output"],
    scheduler.OffloadingConnectorScheduler.build_connector_meta: ["self", "scheduler_output"],
    scheduler.OffloadingConnectorScheduler.on_new_request: ["self", "request"],
    worker.OffloadingConnectorWorker.__init__: ["self", "spec", "vllm_config", "kv_cache_config"],
    worker.OffloadingConnectorWorker.get_finished: ["self", "finished_req_ids"],
    worker.OffloadingConnectorWorker.build_connector_worker_meta: ["self"],
    KVConnectorBase_V1.get_transfer_results: ["self", "finished_req_ids"],
    KVConnectorBase_V1.get_block_ids_with_load_errors: ["self"],
    tiering.SecondaryTierManager.__init__: [
        "self",
        "offloading_spec",
        "primary_kv_view",
        "tier_type",
        "backpressure_detector",
    ],
    tiering.SecondaryTierManager.submit_load: ["self", "job_metadata"],
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__qualname__)
def test_signature(function: Any) -> None:
    found = list(inspect.signature(function).parameters)
    assert found == SIGNATURES[function], (
        f"vLLM's {function.__qualname__} now takes {found}; adapt forebay.vllm_ext and its supported version range"
    )


def test_connector_methods_we_override_exist() -> None:
    from forebay.vllm_ext.connector import ForebayConnector, ForebayConnectorScheduler, ForebayConnectorWorker

    pairs = [
        (ForebayConnector, offloading_connector.OffloadingConnector),
        (ForebayConnectorScheduler, scheduler.OffloadingConnectorScheduler),
        (ForebayConnectorWorker, worker.OffloadingConnectorWorker),
    ]
    ours = {"pool_manager", "take_failed_blocks", "take_failed_requests"}
    for mine, theirs in pairs:
        names = [name for name in vars(mine) if not name.startswith("_") and name not in ours]
        missing = [name for name in names if not hasattr(theirs, name)]
        assert not missing, f"vLLM's {theirs.__name__} no longer has {missing}: what we override is never called"


def test_attributes_we_read() -> None:
    source = inspect.getsource(scheduler.OffloadingConnectorScheduler.__init__)
    for name in ("self.manager", "self._req_status", "self._stale_job_threshold", "self._jobs"):
        assert name in source, f"OffloadingConnectorScheduler no longer sets {name}"
    assert {"offload_keys", "next_stored_chunk_idx"} <= set(scheduler.RequestGroupState.__dataclass_fields__)
    source = inspect.getsource(worker.OffloadingConnectorWorker.__init__)
    for name in ("self.worker", "self._load_jobs", "self._connector_worker_meta"):
        assert name in source, f"OffloadingConnectorWorker no longer sets {name}"
    fields = common.OffloadingWorkerMetadata.__dataclass_fields__
    assert list(fields) == ["completed_jobs", "transfer_stats"], "OffloadingWorkerMetadata has changed its fields"
    assert set(KVConnectorTransferResults.__dataclass_fields__) == {
        "finished_sending",
        "finished_recving",
        "failed_recving",
    }
    assert {"invalid_block_ids", "kv_connector_worker_meta", "failed_recving"} <= set(
        KVConnectorOutput.__dataclass_fields__
    )


def test_vllm_still_asserts_success_where_we_replace_it() -> None:
    """If vLLM learns to survive failed transfers itself, our worker override may go."""
    source = inspect.getsource(worker.OffloadingConnectorWorker.get_finished)
    assert "assert transfer_result.success" in source, (
        "vLLM now handles failed transfers: review ForebayConnectorWorker"
    )


def test_registration_is_idempotent() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    from forebay.vllm_ext.plugin import register

    register()
    register()
    assert KVConnectorFactory.get_connector_class_by_name("ForebayConnector").__name__ == "ForebayConnector"
    assert OffloadingSpecFactory.get_spec_cls({"spec_name": "ForebaySpec"}).__name__ == "ForebaySpec"
    assert SecondaryTierFactory.get_tier_class({"type": "forebay"}).__name__ == "ForebayTier"
