"""vLLM's worker for diffusion models: one `forebay.diffusion` runtime for each rank.

All ranks get the same steps in the same order and run them alike, so they agree without a word; rank 0 answers.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch
from vllm.distributed import get_tp_group
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.worker.gpu_worker import init_worker_distributed_environment
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from forebay.diffusion.cache import StateStore
from forebay.diffusion.depth import DepthTable, find_table
from forebay.diffusion.runtime import Runtime, RuntimeSettings
from forebay.diffusion.transformer import Transformer
from forebay.diffusion.weights import Shard, load
from forebay.storage.units import format_bytes
from forebay.vllm_ext.diffusion.config import ServingConfig, read_config
from forebay.vllm_ext.diffusion.driver import Driver
from forebay.vllm_ext.diffusion.folder import make_finder, model_folder
from forebay.vllm_ext.diffusion.memory import available_bytes
from forebay.vllm_ext.diffusion.messages import DiffusionOutput, DiffusionStep
from forebay.vllm_ext.diffusion.states import PoolStates
from forebay.vllm_ext.plugin import log_like_vllm
from forebay.vllm_ext.pool_config import read_pool_config

logger = logging.getLogger(__name__)
PREFIX_SHARE = 0.25
"""Of the memory for requests that states of prefixes may take, unless the user says (our choice)."""


class DiffusionWorker(WorkerBase):
    """Set by the architecture hook: see `architecture`."""

    driver: Driver
    _states: PoolStates | None = None
    device: torch.device

    def init_device(self) -> None:
        """Find the device and the other ranks."""
        kind = current_platform.device_type
        self.device = torch.device(kind if kind == "cpu" else f"{kind}:{self.local_rank}")
        if kind == "cpu":
            self.parallel_config.disable_custom_all_reduce = True
            init = self.distributed_init_method
            os.environ["VLLM_DIST_IDENT"] = Path(init.removeprefix("file://")).name.split(":")[-1]
        else:
            torch.cuda.set_device(self.device)
        init_worker_distributed_environment(
            self.vllm_config, self.rank, self.distributed_init_method, self.local_rank, current_platform.dist_backend
        )
        set_random_seed(self.model_config.seed)
        log_like_vllm()

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Read the weights and make the runtime."""
        folder = model_folder(self.vllm_config)
        group = get_tp_group()
        shard = Shard(group.rank_in_group, group.world_size)
        weights = load(folder, self.model_config.dtype, str(self.device), shard)
        transformer = Transformer(weights, reduce=group.all_reduce if group.world_size > 1 else None)
        self.driver = Driver(self._make_runtime(transformer, folder))

    def _make_runtime(self, transformer: Transformer, folder: Path) -> Runtime:
        server = read_config(self.vllm_config.additional_config)
        config = transformer.config
        table = DepthTable.read(server.table, config.layers) if server.table else find_table(folder, config)
        left = self._agree(available_bytes(self.vllm_config, self.device))
        cache = int(left * PREFIX_SHARE) if server.cache is None else server.cache
        settings = RuntimeSettings(
            cache_bytes=cache,
            request_bytes=left - cache,
            batch=self.scheduler_config.max_num_seqs,
            rule=server.rule,
            tau=table.tau if server.tau is None else server.tau,
        )
        store, finder = self._open_store(server, folder, transformer), make_finder(self.vllm_config)
        runtime = Runtime(transformer, table, settings, store, finder)
        self._check_longest(runtime, left - cache)
        return runtime

    def _open_store(self, server: ServingConfig, folder: Path, transformer: Transformer) -> StateStore | None:
        if server.pool is None:
            return None
        group, config = get_tp_group(), read_pool_config(server.model_dump(mode="json"))
        name = str(self.model_config.served_model_name)
        self._states = PoolStates.open(config, folder, transformer, name, group.rank_in_group, group.world_size)
        return self._states

    def _check_longest(self, runtime: Runtime, space: int) -> None:
        """Refuse to start where the longest request could never run."""
        needed = self.model_config.max_model_len * runtime.bytes_per_token
        if needed > space:
            raise ValueError(
                f"a request of --max-model-len {self.model_config.max_model_len} needs {format_bytes(needed)} of keys "
                f"and values, and there are {format_bytes(space)} for requests; lower it to "
                f"{space // runtime.bytes_per_token}, or give more memory (--gpu-memory-utilization, on CPUs "
                f"VLLM_CPU_KVCACHE_SPACE)"
            )

    def _agree(self, count: int) -> int:
        """The least of all ranks: they must admit alike."""
        group = get_tp_group()
        if group.world_size == 1:
            return count
        least = torch.tensor(count)
        torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN, group=group.cpu_group)
        return int(least)

    def execute_model(self, scheduler_output: DiffusionStep) -> DiffusionOutput:
        """One step of the scheduler's."""
        with torch.inference_mode():
            return self.driver.run(scheduler_output)

    # What vLLM asks of a worker that has nothing to say to it.

    def get_kv_cache_spec(self) -> dict[str, Any]:
        """Empty: keys and values are the runtime's, not vLLM's."""
        return {}

    def get_supported_kv_cache_layouts(self) -> list[str]:
        """Any: there is none of vLLM's."""
        return ["LBNHC"]

    def determine_available_memory(self) -> int:
        """Bytes for vLLM's own cache, which stays empty."""
        return 0

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Nothing: see `get_kv_cache_spec`."""

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Nothing is compiled."""
        return CompilationTimes(language_model=0.0, encoder=0.0)

    def get_supported_tasks(self) -> tuple[str, ...]:
        """It generates."""
        return ("generate",)

    def update_max_model_len(self, max_model_len: int) -> None:
        """The scheduler sees to it."""

    def shutdown(self) -> None:
        """Write what the pool is to keep."""
        if self._states is not None:
            self._states.close()

    def execute_dummy_batch(self) -> None:
        """Ranks of different replicas share nothing."""
