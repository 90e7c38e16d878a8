"""Time to first token of a real model: `ttft_warm_vs_recompute`, `ttft_warm_vs_device_hit`.

Measured through `vllm serve`, which runs in a process of its own.
"""

from __future__ import annotations

from forebay.bench.kv.session import BenchError
from forebay.bench.suite import Context, Measurement


def measure(context: Context) -> Measurement:
    """Both ratios.

    Raises:
        BenchError: the answers differ: then the times mean nothing.
    """
    context.say("serving a real model (half a minute to start)")
    from forebay.bench.kv.engine import measure_ttft

    found = measure_ttft(context.work, quick=context.quick)
    if not found["identical_answers"]:
        raise BenchError("greedy answers differ between recomputed and warm: the loaded KV is wrong")
    return Measurement(found.pop("ratios"), found)
