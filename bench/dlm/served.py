"""A real `vllm serve` against the bare runtime: `server_vs_runtime`, `restart_hit_rate`.

A model of LLaDA's shape, narrow and with few layers, in a folder as LLaDA is published. The same requests, which share
a prefix, go to the server, all at once, and into a runtime in this process, in turn. Before the server another engine
ran on the same pool and was killed: the states of its prefixes have to come out of the pool.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from forebay.bench.dlm.quality import MODEL
from forebay.bench.dlm.shape import llada_shape, random_weights, save
from forebay.bench.rounds import Series, interleave
from forebay.bench.server import START_LIMIT, ServerError, VllmServer, best_dtype
from forebay.bench.suite import Context, Measurement, medians
from forebay.diffusion.decoding import DecodingSettings
from forebay.diffusion.depth import DepthTable
from forebay.diffusion.runtime import Runtime, RuntimeSettings
from forebay.diffusion.transformer import Transformer

REQUESTS, PREFIX, REST = 8, 300, 40
LAYERS, LENGTH = 2, 32
PREFIXES = 4
"""Different ones that the server has to find."""


def measure(context: Context) -> Measurement:
    """Both ratios; two starts of vLLM, of which one is a server.

    Raises:
        ServerError: vLLM is missing, does not start or does not answer.
    """
    folder = context.work / "model"
    weights = random_weights(llada_shape(layers=LAYERS, vocabulary=4096, positions=1024))
    save(weights, folder, MODEL)
    table = DepthTable({0: 1}, LAYERS, "made up")
    table.write(folder / "forebay_depth.json")
    transformer = Transformer(weights)
    found = Measurement()
    context.say("an engine that is killed")
    _live_once(folder, context)
    context.say("start of the server")
    with VllmServer(
        folder, None, context.work / "server.log", arguments=["--additional-config", json.dumps(_options(context))]
    ) as server:
        for number in range(PREFIXES):
            _complete(server, _prompt(100 + number, number), number)
        counts = _wait_for_counts(server)
        context.say("server and runtime")
        arms: dict[str, Any] = {
            "server": lambda: _serve(server),
            "runtime": lambda: _run(Runtime(transformer, table, RuntimeSettings(batch=REQUESTS))),
        }
        rounds = interleave(arms, min(context.rounds, 2) if context.quick else context.rounds, context.say)
        server.kill()  # nothing of it is needed any more
    series = {name: Series.of(values, "tokens/s") for name, values in rounds.items()}
    found.ratios["server_vs_runtime"] = series["server"].median / series["runtime"].median
    found.details["tokens_per_second"] = medians(series)
    found.details["after_restart"] = counts
    found.ratios["restart_hit_rate"] = counts["prefix_restored"] / max(1.0, counts["asked"])
    return found


def _options(context: Context) -> dict[str, Any]:
    pool = {
        "path": str(context.work / "pool"),
        "stripe": "64KiB",
        "devices": [{"name": "disk", "kind": "file", "path": str(context.work / "states.kv"), "size": "256MiB"}],
    }
    return {"forebay": {"pool": pool, "refresh": 16}}


def _live_once(folder: Path, context: Context) -> None:
    """An engine answers prompts with the prefixes that are to be found again, and is killed."""
    life = {
        "dtype": best_dtype(),
        "additional_config": _options(context),
        "prompts": [_prompt(number, number) for number in range(PREFIXES)],
        "length": LENGTH,
        "prefix": PREFIX,
    }
    log = context.work / "first.log"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with log.open("wb") as output:
        done = subprocess.run(
            [sys.executable, "-m", "forebay.bench.dlm.first_life", str(folder), json.dumps(life)],
            stdout=output, stderr=subprocess.STDOUT, env=environment, timeout=START_LIMIT, check=False,
        )  # fmt: skip
    if done.returncode != -signal.SIGKILL:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise ServerError(f"the first engine ended with {done.returncode}; the end of {log}:\n{tail}")


def _prompt(seed: int, prefix: int = 0) -> list[int]:
    def tokens(count: int, seed: int) -> list[int]:
        found: list[int] = torch.randint(5, 4096, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
        return found

    return tokens(PREFIX, 1000 + prefix) + tokens(REST, seed)


def _serve(server: VllmServer) -> float:
    """Tokens per second of all requests at once."""
    before = time.perf_counter()
    with ThreadPoolExecutor(REQUESTS) as pool:
        counts = list(pool.map(lambda number: _complete(server, _prompt(number), number), range(REQUESTS)))
    if counts != [LENGTH] * REQUESTS:
        raise ServerError(f"answers of {counts} tokens instead of {LENGTH} each")
    return sum(counts) / (time.perf_counter() - before)


def _complete(server: VllmServer, prompt: list[int], seed: int) -> int:
    """Tokens of an answer."""
    body = {
        "model": "model", "prompt": prompt, "max_tokens": LENGTH, "temperature": 0, "seed": seed, "ignore_eos": True,
        "vllm_xargs": {"prefix": PREFIX},
    }  # fmt: skip
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=300) as response:
            count: int = json.load(response)["usage"]["completion_tokens"]
            return count
    except OSError as error:
        raise ServerError(f"/v1/completions: {error}; see {server.log}") from None


def _run(runtime: Runtime) -> float:
    """Tokens per second of the bare runtime."""
    settings = DecodingSettings(length=LENGTH, steps=LENGTH // 2, block=32, refresh=16, ignore_end=True)
    before = time.perf_counter()
    for number in range(REQUESTS):
        runtime.submit(str(number), torch.tensor(_prompt(number)), settings, PREFIX)
    while not runtime.idle:
        runtime.step()
    return REQUESTS * LENGTH / (time.perf_counter() - before)


def _wait_for_counts(server: VllmServer) -> dict[str, float]:
    """The prefix counters, once they have arrived at `/metrics`."""
    end = time.monotonic() + 10
    while True:
        found = server.metrics("forebay:dlm_")
        names = ("prefix_hits", "prefix_misses", "prefix_restored")
        counts = {name: found.get(f"forebay:dlm_{name}_total", 0.0) for name in names}
        asked = counts["prefix_hits"] + counts["prefix_misses"]
        if asked >= PREFIXES or time.monotonic() > end:
            return counts | {"asked": asked}
        time.sleep(0.2)
