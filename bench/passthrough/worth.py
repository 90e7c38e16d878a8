"""A tier that is slower than computing must not make anything slower: `never_worse_ttft`.

`vllm serve` with a real model and a pool on one loop device. Prompts of two lengths (one in the quick form) are stored
and read back, so that the server knows the device as a fast one; after some seconds of silence the kernel throttles it
to 1 MB/s. Then the same questions are asked in turn with the engine's own cache empty: as they are, and with the option
that rules the pool out. The ratio is that of the medians, of the prompt for which it is worse. What the very first
request took, from which the server finds out, is among the details.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from forebay.bench.demo import NO_POOL
from forebay.bench.kv.session import BenchError
from forebay.bench.models import demo_model
from forebay.bench.rig import throttled_devices
from forebay.bench.rounds import Series, interleave
from forebay.bench.server import Answer, VllmServer
from forebay.bench.suite import Context, Measurement, medians
from forebay.bench.texts import long_documents

RATE = 1e6
"""Bytes per second of the throttled device."""
DEVICE_BYTES = 96 << 20
LENGTHS, QUICK_LENGTHS = (330, 1100), (330,)
"""Where documents are cut. In float32 a block of 128 takes 6 s to load at that rate."""
TURNS = 4
"""Questions of each kind in one round: 5% is little beside the noise of a machine that does something else as well."""
SILENCE = 6.0
"""Seconds after which what the server knows of a device is too old to be relied on, and a little more."""


def measure(context: Context) -> Measurement:
    """The ratio; one start of the server.

    Raises:
        RigError, ThrottleError: devices cannot be made or throttled here.
        ServerError: the server did not start or answer.
        BenchError: the answers differ, or the device was not used while it was fast.
    """
    model = demo_model()
    with throttled_devices(context.work, [DEVICE_BYTES]) as rig:
        pool = _pool(context.work, rig.devices[0])
        server = VllmServer(model, pool, context.work / "server.log", arguments=["--max-model-len", "4096"])
        context.say("serving a real model (half a minute to start)")
        server.launch()
        try:
            prompts = [
                long_documents(model, 1, min_tokens=length * 3 // 4, max_tokens=length)[0].prompt
                for length in (QUICK_LENGTHS if context.quick else LENGTHS)
            ]
            server.start()
            fast = [_meet(server, prompt) for prompt in prompts]
            rig.set_rates([RATE])
            time.sleep(SILENCE)
            context.say(f"asking with a device of {RATE / 1e6:g} MB/s")
            return _compare(server, prompts, fast, TURNS * context.rounds)
        finally:
            server.kill()  # nothing of it is needed any more
            rig.set_rates([0])


def _pool(work: Path, device: Path) -> Path:
    path = work / "pool.yaml"
    devices = [{"name": "disk", "kind": "file", "path": str(device)}]
    path.write_text(json.dumps({"path": str(work / "pool"), "devices": devices}))
    return path


def _meet(server: VllmServer, prompt: str) -> Answer:
    """Store a prompt and read it back."""
    cold = server.ask(prompt, max_tokens=4)
    server.wait_for_stores()
    fast = _ask(server, prompt)
    if not fast.cached_tokens:
        raise BenchError("nothing was loaded from a fast device: there is nothing to compare")
    if fast.text != cold.text:
        raise BenchError("greedy answers differ between loaded and computed: the loaded KV is wrong")
    return fast


def _ask(server: VllmServer, prompt: str, extra: Mapping[str, Any] | None = None) -> Answer:
    server.drop_engine_cache()
    return server.ask(prompt, max_tokens=4, extra=extra)


def _compare(server: VllmServer, prompts: Sequence[str], fast: Sequence[Answer], turns: int) -> Measurement:
    arms: dict[str, Callable[[], Answer]] = {}
    for number, prompt in enumerate(prompts):
        arms[f"pool {number}"] = partial(_ask, server, prompt)
        arms[f"without {number}"] = partial(_ask, server, prompt, NO_POOL)
    answers = interleave(arms, turns)
    series = {name: Series.of([answer.ttft for answer in found], "s") for name, found in answers.items()}
    ratios = [series[f"pool {n}"].median / series[f"without {n}"].median for n in range(len(prompts))]
    details = {
        "ttft": medians(series),
        "ratio_of_each_prompt": ratios,
        "finding_out": answers["pool 0"][0].ttft,
        "prompt_tokens": [answer.prompt_tokens for answer in fast],
        "loaded_tokens": {name: [answer.cached_tokens for answer in found] for name, found in answers.items()},
        "fast_device": [{"ttft": answer.ttft, "loaded_tokens": answer.cached_tokens} for answer in fast],
    }
    return Measurement({"never_worse_ttft": max(ratios)}, details)
