"""Time to first token of a real model behind `vllm serve`: recomputed, warm from the pool, still in the engine."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from forebay.bench.demo import NO_POOL
from forebay.bench.models import demo_model
from forebay.bench.server import Answer, VllmServer, best_dtype
from forebay.bench.texts import long_documents

PROMPT_TOKENS = 4250
"""Where the document is cut. The prompt then has 33 whole KV blocks and 65 tokens more: half a block is what is left
to compute on average. The fewer are left, the better the pool looks against recomputing and the worse against a hit."""


def measure_ttft(work: Path, *, quick: bool = False) -> dict[str, Any]:
    """Serve SmolLM2-135M-Instruct with the pool on one file device and time a prompt of at least 4,000 tokens.

    One round asks the same question warm from the pool (the engine's own cache emptied before), then still in the
    engine, and, in every fourth round of the full form, recomputed (no cache at all). The first, cold request counts
    as recomputed too.

    Returns:
        Medians and all samples in seconds, prompt and cached tokens, and whether all greedy answers were identical.

    Raises:
        ServerError: the server did not start or answer.
    """
    work.mkdir(parents=True, exist_ok=True)
    model = demo_model()
    pool = work / "pool.yaml"
    pool.write_text(json.dumps(_file_pool(work)))
    samples: dict[str, list[Answer]] = {"recomputed": [], "warm": [], "device_hit": []}
    server = VllmServer(model, pool, work / "server.log", arguments=["--max-model-len", "8192"])
    server.launch()
    try:
        document = long_documents(model, 1, max_tokens=PROMPT_TOKENS)[0]
        server.start()
        samples["recomputed"].append(server.ask(document.prompt))
        server.wait_for_stores()
        for round_number in range(3 if quick else 12):
            server.drop_engine_cache()
            samples["warm"].append(server.ask(document.prompt))
            samples["device_hit"].append(server.ask(document.prompt))
            if not quick and round_number % 4 == 2:
                server.drop_engine_cache()
                samples["recomputed"].append(server.ask(document.prompt, extra=NO_POOL))
        read = server.metrics().get("forebay:kv_device_read_bytes_total", 0.0)
    finally:
        server.stop()
    return _report(samples, read)


def _file_pool(work: Path) -> dict[str, Any]:
    return {
        "path": str(work / "pool"),
        "devices": [{"name": "file0", "kind": "file", "path": str(work / "pool" / "file0.kv"), "size": "2GiB"}],
    }


def _report(samples: dict[str, list[Answer]], read: float) -> dict[str, Any]:
    answers = [answer for group in samples.values() for answer in group]
    medians = {name: statistics.median(answer.ttft for answer in group) for name, group in samples.items()}
    return {
        "model": "SmolLM2-135M-Instruct",
        "dtype": best_dtype(),
        "prompt_tokens": answers[0].prompt_tokens,
        "cached_tokens": {name: [answer.cached_tokens for answer in group] for name, group in samples.items()},
        "ttft_seconds": medians,
        "all_seconds": {name: [round(answer.ttft, 4) for answer in group] for name, group in samples.items()},
        "bytes_read_from_file": read,
        "identical_answers": len({answer.text for answer in answers}) == 1,
        "ratios": {
            "ttft_warm_vs_recompute": medians["recomputed"] / medians["warm"],
            "ttft_warm_vs_device_hit": medians["warm"] / medians["device_hit"],
        },
    }
