"""Engines that need a process of their own; run by `run_isolated`."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.engines.harness import PoolEngine, prompt


def pool(folder: str, **changes: Any) -> dict[str, Any]:
    """Memory and one file."""
    return {
        "path": f"{folder}/state",
        "stripe": "64KiB",
        "devices": [
            {"name": "ram", "kind": "dram", "size": "8MiB", "huge_pages": False},
            {"name": "ssd0", "kind": "file", "path": f"{folder}/ssd0.kv", "size": "64MiB", "buffered": True},
        ],
        "faults": {"deadline": "2s", "errors": 1000},
        **changes,
    }


def two_groups(folder: str, model: str, seeds: list[int]) -> dict[str, Any]:
    """Cold, warm, and warm with a device that fails: a model with several KV-cache groups."""
    engine = PoolEngine(pool(folder), model=Path(model))
    prompts = [prompt(seed, blocks=7) for seed in seeds]
    cold = [engine.ask(ids) for ids in prompts]
    engine.forget()
    warm = [engine.ask(ids) for ids in prompts]
    engine.forget()
    engine.faults["ssd0"].fail(errno.EIO, every=5)
    failing = [engine.ask(ids) for ids in prompts]
    engine.recover()
    engine.forget()
    again = [engine.ask(ids) for ids in prompts]
    engine.settle()
    groups = len(engine.core.scheduler.kv_cache_config.kv_cache_groups)
    result = {
        "cold": cold,
        "warm": warm,
        "failing": failing,
        "again": again,
        "groups": groups,
        "leases": engine.leases(),
    }
    engine.close()
    return result


def chunks_of_blocks(folder: str, seeds: list[int]) -> dict[str, Any]:
    """Chunks of three KV blocks striped in two layer groups; one prompt's hit begins inside a chunk."""
    engine = PoolEngine(pool(folder, layer_groups=2), extra={"blocks_per_chunk": 3})
    prompts = [prompt(seed, blocks=9) for seed in seeds]
    cold = [engine.ask(ids) for ids in prompts]
    engine.forget()
    engine.ask(prompts[0][: 4 * 128 + 5])
    warm = [engine.ask(ids) for ids in prompts]
    result = {"cold": cold, "warm": warm}
    engine.settle()
    engine.close()
    return result


def adapters(folder: str, model: str, first: str, second: str, seed: int) -> dict[str, Any]:
    """One adapter name whose content changes between requests, and no adapter at all."""
    import shutil

    from vllm.lora.request import LoRARequest

    engine = PoolEngine(pool(folder), model=Path(model), enable_lora=True, max_lora_rank=8, max_loras=1)
    ids = prompt(seed)
    path = Path(folder) / "adapter"
    result: dict[str, Any] = {}
    for name, source in (("first", first), ("second", second)):
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(source, path)
        number = 1 if name == "first" else 2
        request = LoRARequest("tuned", number, str(path))
        result[name] = engine.ask(ids, lora_request=request)
        engine.forget()
        result[f"{name} again"] = engine.ask(ids, lora_request=request)
        engine.forget()
        engine.llm.llm_engine.remove_lora(number)
    result["none"] = engine.ask(ids)
    engine.settle()
    result["leases"] = engine.leases()
    engine.close()
    return result


def two_ranks(folder: str, seeds: list[int]) -> dict[str, Any]:
    """Tensor parallelism: every rank has its lane, and the hit is decided once for both."""
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    engine = PoolEngine(pool(folder), tensor_parallel_size=2)
    prompts = [prompt(seed, blocks=3) for seed in seeds]
    cold = [engine.ask(ids, tokens=2) for ids in prompts]
    engine.forget()
    warm = [engine.ask(ids, tokens=2) for ids in prompts]
    engine.settle()
    result = {"cold": cold, "warm": warm, "lanes": engine.pool.lanes, "leases": engine.leases()}
    engine.close()
    return result


def one_life(folder: str, model: str, seeds: list[int], changes: dict[str, Any]) -> dict[str, Any]:
    """Ask, stop cleanly: for restarts with the same or other models and configurations."""
    engine = PoolEngine({**pool(folder), **changes}, model=Path(model))
    warm = engine.pool.stats().chunks
    answers = [engine.ask(prompt(seed)) for seed in seeds]
    engine.settle()
    engine.close()
    return {"answers": answers, "chunks at start": warm}


SCRIPTS: dict[str, Callable[..., dict[str, Any]]] = {
    script.__name__: script for script in (two_groups, chunks_of_blocks, adapters, two_ranks, one_life)
}

if __name__ == "__main__":
    print("RESULT", json.dumps(SCRIPTS[sys.argv[1]](**json.loads(sys.argv[2]))), flush=True)
