"""A real vLLM engine in this process with the pool behind it, whose devices can be made to fail."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forebay.bench.server import transfer_config
from forebay.storage.device.faulty import FaultyDevice

MODEL = Path(__file__).parents[1] / "assets" / "tinymoe-qwen3-8m"
BLOCK = 128
"""Tokens of a KV block on vLLM's CPU platform."""
VOCABULARY = 4096
BASELINE_LIMIT = 300


def prompt(seed: int, blocks: int = 8, tail: int = 20) -> list[int]:
    """Token ids: `blocks` whole KV blocks and a tail."""
    return random.Random(seed).choices(range(10, VOCABULARY), k=blocks * BLOCK + tail)


def environment() -> dict[str, str]:
    """Variables of a quiet, offline, in-process engine."""
    return {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }


def engine_arguments(model: Path = MODEL, **changes: Any) -> dict[str, Any]:
    """Arguments of `vllm.LLM` that are the same with and without the pool."""
    return {
        "model": str(model),
        "dtype": "float32",
        "max_model_len": 2048,
        "max_num_seqs": 8,
        "enforce_eager": True,
        "enable_prefix_caching": True,
        "num_gpu_blocks_override": 64,
        "seed": 0,
        **changes,
    }


class PoolEngine:
    """`vllm.LLM` with a pool; every file device sits behind a `FaultyDevice`."""

    def __init__(self, pool: dict[str, Any], **arguments: Any) -> None:
        os.environ.update(environment())
        from vllm import LLM

        import forebay.storage.lanes as lanes

        self.faults: dict[str, FaultyDevice] = {}
        opened = lanes.open_device

        def open_faulty(config: Any, **options: Any) -> Any:
            device = opened(config, **options)
            if config.kind != "file":
                return device
            self.faults[config.name] = FaultyDevice(device)
            return self.faults[config.name]

        lanes.open_device = open_faulty
        transfer = transfer_config(pool)
        transfer["kv_connector_extra_config"].update(arguments.pop("extra", {}))
        try:
            self.llm = LLM(**engine_arguments(**arguments), kv_transfer_config=transfer)
        finally:
            lanes.open_device = opened

    @property
    def core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def connector(self) -> Any:
        return self.core.scheduler.connector.connector_scheduler

    @property
    def manager(self) -> Any:
        return self.connector.manager

    @property
    def pool(self) -> Any:
        return self.manager.pool

    def ask(self, ids: Sequence[int], tokens: int = 8, **options: Any) -> tuple[list[int], int]:
        """Greedy continuation and how many prompt tokens were cached."""
        ((answer, cached),) = self.ask_all([ids], tokens, **options)
        return answer, cached

    def ask_all(self, prompts: Sequence[Sequence[int]], tokens: int = 8, **options: Any) -> list[tuple[list[int], int]]:
        """The same for several prompts at once."""
        from vllm import SamplingParams

        salt = {"cache_salt": options.pop("cache_salt")} if "cache_salt" in options else {}
        inputs = [{"prompt_token_ids": list(ids), **salt} for ids in prompts]
        outputs = self.llm.generate(inputs, SamplingParams(max_tokens=tokens, temperature=0), use_tqdm=False, **options)
        return [(list(output.outputs[0].token_ids), output.num_cached_tokens or 0) for output in outputs]

    def settle(self, limit: float = 30) -> None:
        """Step the engine until every transfer has ended."""
        end = time.monotonic() + limit
        while self.core.scheduler.has_requests():
            self.llm.llm_engine.step()
            assert time.monotonic() < end, f"transfers did not end: {self.connector._jobs}"

    def forget(self) -> None:
        """Empty the engine's own prefix cache; the pool keeps what it has."""
        self.settle()
        assert self.llm.reset_prefix_cache()

    def reset_pool(self) -> None:
        """Empty both."""
        self.forget()
        self.pool.reset()

    def recover(self, limit: float = 10) -> None:
        """Take every fault away and wait until all devices are used again."""
        for device in self.faults.values():
            device.clear()
        self.settle()
        worker = self.worker
        end = time.monotonic() + limit
        while not all(report.usable and report.writable for report in worker.engine.health()):
            assert time.monotonic() < end, f"devices stay quarantined: {worker.engine.health()}"
            worker._results += worker.engine.poll()
            time.sleep(0.02)
        self.pool.report_health(worker.engine.health())

    @property
    def worker(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        connector: Any = get_kv_transfer_group()
        return connector.connector_worker.worker

    def leases(self) -> int:
        """Leases and writing entries that the pool still holds."""
        stats = self.pool.stats()
        return int(stats.leases + stats.writing)

    def close(self) -> None:
        self.core.shutdown()


def baseline(prompts: Sequence[Sequence[int]], tokens: int = 8, **arguments: Any) -> list[list[int]]:
    """What an engine without any pool answers, in a process of its own."""
    code = f"""
        import json, sys
        from vllm import LLM, SamplingParams
        if __name__ == "__main__":
            prompts, arguments = json.load(sys.stdin)
            llm = LLM(**arguments)
            sampling = SamplingParams(max_tokens={tokens}, temperature=0)
            answers = [llm.generate({{"prompt_token_ids": ids}}, sampling, use_tqdm=False) for ids in prompts]
            print("ANSWERS", json.dumps([list(answer[0].outputs[0].token_ids) for answer in answers]))
    """
    import json

    arguments = engine_arguments(**{"enable_prefix_caching": False, **arguments})
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        input=json.dumps([[list(ids) for ids in prompts], arguments]),
        env={**os.environ, **environment()},
        capture_output=True,
        text=True,
        timeout=BASELINE_LIMIT,
        check=False,
    )
    for line in done.stdout.splitlines():
        if line.startswith("ANSWERS"):
            answers: list[list[int]] = json.loads(line.removeprefix("ANSWERS"))
            return answers
    raise AssertionError(f"the engine without a pool gave no answer:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
