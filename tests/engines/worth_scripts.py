"""One engine on one file device that is fast, slow and fast again; run by `run_isolated`."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from forebay.storage.rates import ReadRates
from tests.engines.harness import PoolEngine, prompt

BLOCKS = 14
SLOW = 1e6
"""Bytes per second of the slow device; the prompt has 7 MiB in the pool."""
ROUNDS = 3


def slow_device(folder: str) -> dict[str, Any]:
    """Answers, cached tokens and seconds to the first token in every state of the device."""
    import forebay.vllm_ext.worth as worth

    worth.PROBE_PERIOD = 0.3
    device = {"name": "ssd0", "kind": "file", "path": f"{folder}/ssd0.kv", "size": "64MiB", "buffered": True}
    engine = PoolEngine({"path": f"{folder}/state", "stripe": "64KiB", "devices": [device]})
    judge = engine.connector._judge
    ids = prompt(1, blocks=BLOCKS)
    engine.ask(prompt(2, blocks=BLOCKS))  # the first step of an engine takes longer than others
    found: dict[str, Any] = {"cold": _ask(engine, ids)}
    found["fast"] = [_ask(engine, ids) for _ in range(ROUNDS)]
    found["without"] = [_ask(engine, ids, no_pool=True) for _ in range(ROUNDS)]
    engine.faults["ssd0"].throttle(SLOW)
    found["grown slow"] = _ask(engine, ids)
    found["slow"] = [_ask(engine, ids) for _ in range(ROUNDS)]
    judge.rates = ReadRates(1)
    found["slow from the start"] = _ask(engine, ids)
    engine.faults["ssd0"].clear()
    time.sleep(0.4)
    found["asked again"] = _ask(engine, ids)
    found["fast again"] = _ask(engine, ids)
    engine.settle()
    stats = engine.pool.stats()
    found |= {"leases": engine.leases(), "failed loads": stats.failed_loads, "estimates": _estimates(judge)}
    engine.close()
    return found


def _ask(engine: PoolEngine, ids: list[int], *, no_pool: bool = False) -> dict[str, Any]:
    """One question with the engine's own cache empty."""
    from vllm import SamplingParams

    engine.forget()
    extra = {"kv_transfer_params": {"kv_load_tiers": []}} if no_pool else None
    sampling = SamplingParams(max_tokens=1, temperature=0, extra_args=extra)
    before = time.perf_counter()
    (output,) = engine.llm.generate({"prompt_token_ids": ids}, sampling, use_tqdm=False)
    return {
        "ttft": time.perf_counter() - before,
        "cached": output.num_cached_tokens or 0,
        "answer": list(output.outputs[0].token_ids),
    }


def _estimates(judge: Any) -> dict[str, float]:
    return {"bandwidth": judge.bandwidths()[0], "prefill": judge.cost.seconds(0, BLOCKS * 128)}


if __name__ == "__main__":
    print("RESULT", json.dumps({"slow_device": slow_device}[sys.argv[1]](**json.loads(sys.argv[2]))), flush=True)
