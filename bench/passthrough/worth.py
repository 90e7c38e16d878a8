"""A tier that is slower than computing must not make anything slower: `never_worse_ttft`.

`vllm serve` with a real model and a pool on one loop device. A prompt is stored and read back, so that the server knows
the device as a fast one; after some seconds of silence the kernel throttles it to 1 MB/s. Each round then asks the same
question with the engine's own cache empty: as it is, and with the request option that rules the pool out. Either is
asked several times in turn, and the fastest counts, since the noise of a machine only ever adds. The ratio is the worst
round's. What the very first request took, from which the server finds out, is among the details.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

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
DEVICE_BYTES = 192 << 20
TOKENS, QUICK_TOKENS = 1100, 290
"""Where the document is cut. In float32 a block of 128 takes 6 s to load at that rate."""
TURNS = 6
"""Questions of each kind in one round."""
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
    tokens = QUICK_TOKENS if context.quick else TOKENS
    with throttled_devices(context.work, [DEVICE_BYTES]) as rig:
        pool = _pool(context.work, rig.devices[0])
        server = VllmServer(model, pool, context.work / "server.log", arguments=["--max-model-len", "4096"])
        context.say("serving a real model (half a minute to start)")
        server.launch()
        try:
            document = long_documents(model, 1, min_tokens=tokens // 2, max_tokens=tokens)[0]
            server.start()
            return _measure(server, document.prompt, context, lambda rate: rig.set_rates([rate]))
        finally:
            server.kill()  # nothing of it is needed any more
            rig.set_rates([0])


def _pool(work: Path, device: Path) -> Path:
    path = work / "pool.yaml"
    devices = [{"name": "disk", "kind": "file", "path": str(device)}]
    path.write_text(json.dumps({"path": str(work / "pool"), "devices": devices}))
    return path


def _measure(server: VllmServer, prompt: str, context: Context, limit: Callable[[float], None]) -> Measurement:
    def ask(extra: dict[str, object] | None = None) -> Answer:
        server.drop_engine_cache()
        return server.ask(prompt, max_tokens=4, extra=extra)

    cold = ask()
    server.wait_for_stores()
    fast = ask()
    if not fast.cached_tokens:
        raise BenchError("nothing was loaded from a fast device: there is nothing to compare")
    limit(RATE)
    time.sleep(SILENCE)
    context.say(f"asking with a device of {RATE / 1e6:g} MB/s")
    arms: dict[str, Callable[[], Answer]] = {"pool": ask, "without": lambda: ask(NO_POOL)}
    answers = interleave(arms, TURNS * context.rounds)
    if len({answer.text for answer in [cold, fast, *answers["pool"], *answers["without"]]}) > 1:
        raise BenchError("greedy answers differ between loaded and computed: the loaded KV is wrong")
    series = {name: Series.of(_fastest(found), "s") for name, found in answers.items()}
    ratios = [mine / other for mine, other in zip(series["pool"].values, series["without"].values, strict=True)]
    details = {
        "ttft": medians(series),
        "rounds": ratios,
        "finding_out": answers["pool"][0].ttft,
        "all_seconds": {name: [answer.ttft for answer in found] for name, found in answers.items()},
        "prompt_tokens": cold.prompt_tokens,
        "loaded_tokens": {name: [answer.cached_tokens for answer in found] for name, found in answers.items()},
        "fast_device": {"ttft": fast.ttft, "loaded_tokens": fast.cached_tokens},
    }
    return Measurement({"never_worse_ttft": max(ratios)}, details)


def _fastest(answers: Sequence[Answer]) -> list[float]:
    """The best time of each round (seconds)."""
    return [min(answer.ttft for answer in answers[at : at + TURNS]) for at in range(0, len(answers), TURNS)]
