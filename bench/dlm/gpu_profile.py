"""One pass of each kind under a magnifying glass: how long the device computes, how long it could take at best, and
how long it has nothing to do because the host is not ready, or waits for it.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

import torch

from forebay.bench.dlm.arms import BICACHE, BICACHE_DUAL, NONE, Arm
from forebay.bench.dlm.gpu_speed import Bench, seconds, step, wait
from forebay.bench.moe.gpu_card import Roof
from forebay.diffusion import attention

KINDS: dict[str, tuple[Arm, int]] = {
    "full": (NONE, 1),
    "refresh": (BICACHE, 1),
    "behind the prefix": (BICACHE, 1000),
    "block": (BICACHE_DUAL, 1000),
}
"""Arm and T."""
WARM, TIMED = 2, 5
PASSES = WARM + TIMED + 2
"""Of one block: as many steps as it must have at least."""
LISTED = 8
"""Kernels that are named, those that take longest."""
OURS = Path(attention.__file__).parent


def profile(bench: Bench, kind: str, roof: Roof) -> dict[str, Any]:
    """What was found of one kind."""
    arm, refresh = KINDS[kind]
    device = bench.states.tokens_P.device
    settings = replace(bench.settings, steps=bench.settings.length, refresh=refresh)  # one token a step
    request = bench.request(arm, settings)
    counted = list(bench.work.passes(arm.settings(settings), bench.depth(arm)))[WARM]
    for _ in range(WARM):
        step(request)
    taken = median(seconds(device, lambda: step(request)) for _ in range(TIMED))
    need = bench.work.need(counted, settings.length)
    found: dict[str, Any] = {
        "pass": kind, "prefix": bench.prefix, "depth": bench.depth(arm), "seconds": taken,
        "floor_seconds": roof.floor(need), "bytes": need.bytes, "operations": need.operations,
        "bound_by": _bound(need.bytes / roof.bytes_per_second, need.operations / roof.operations_per_second),
    }  # fmt: skip
    if device.type == "cuda":
        found |= _kernels(device, lambda: step(request)) | {"host_waits": host_waits(lambda: step(request))}
        found["idle_share"] = max(0.0, 1 - found["kernel_seconds"] / taken)
    return found


def _bound(bytes_seconds: float, operations_seconds: float) -> str:
    return "bytes" if bytes_seconds > operations_seconds else "operations"


def _kernels(device: torch.device, action: Callable[[], object]) -> dict[str, Any]:
    """Time and number of kernels, copies included, and the ones that take longest."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        action()
        wait(device)
    return summary(profiler.key_averages())


def summary(events: Any) -> dict[str, Any]:
    """Of a profile's events, those on the device."""
    kernels = [one for one in events if one.device_type != torch.autograd.DeviceType.CPU]
    kernels.sort(key=lambda one: -one.self_device_time_total)
    return {
        "kernel_seconds": sum(one.self_device_time_total for one in kernels) / 1e6,
        "kernels": sum(one.count for one in kernels),
        "longest": [
            {"name": one.key[:80], "seconds": one.self_device_time_total / 1e6, "count": one.count}
            for one in kernels[:LISTED]
        ],
    }


def host_waits(action: Callable[[], object]) -> dict[str, int]:
    """How often the host waits for the GPU, by the line of ours that makes it."""
    found: Counter[str] = Counter()

    def note(message: object, *others: object, **more: object) -> None:
        if "synchronizing" in str(message):
            found[_line()] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            action()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return dict(found)


def _line() -> str:
    """The innermost line of the runtime that is being run."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file.parent == OURS:
            return f"diffusion/{file.name}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"
