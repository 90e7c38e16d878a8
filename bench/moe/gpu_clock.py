"""Time on a GPU: how long a launch takes with a cold cache, whether it waits for the device, and what time is left.

Everything here also takes the CPU as the device, where nothing is captured and the host's clock serves.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

if TYPE_CHECKING:
    from torch import Tensor

FLUSH_BYTES = 256 << 20
"""Written between two launches, or twice the L2 cache where that is more (our choice)."""

Tensors = TypeVar("Tensors")


class OutOfTime(Exception):  # noqa: N818 - it ends a step, and is no error
    """The time for the whole run is over."""


class Budget:
    """The time that a run may take, counted from its construction."""

    def __init__(self, seconds: float) -> None:
        self.ends = time.monotonic() + seconds

    @property
    def over(self) -> bool:
        """Whether the time has passed."""
        return time.monotonic() >= self.ends

    def check(self) -> None:
        """Raise OutOfTime when the time has passed."""
        if self.over:
            raise OutOfTime


class Clock:
    """Times launches with none of their data in the L2 cache: a model runs other layers in between."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        # Older PyTorch does not tell the size of the cache.
        cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) if self.cuda else 0
        size = max(FLUSH_BYTES, 2 * cache) if self.cuda else 1
        self.flushed = torch.empty(size, dtype=torch.uint8, device=device)

    def seconds(self, launch: Callable[[], object], prepare: Sequence[Callable[[], object]]) -> float:
        """Mean time of `launch` after each of `prepare`, which is not counted."""
        marks = []
        for step in prepare:
            step()
            self.flushed.zero_()
            started = self._mark()
            launch()
            marks.append((started, self._mark()))
        return statistics.mean(self._between(*pair) for pair in marks)

    def _mark(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, started: Any, ended: Any) -> float:
        if not self.cuda:
            return float(ended - started)
        ended.synchronize()
        return float(started.elapsed_time(ended)) / 1e3


def waits(call: Callable[[], object]) -> bool:
    """Whether a call makes the host wait for the GPU. Run it once before: what it does only the first time may wait."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


def capture(call: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
    """A CUDA graph of a call that has run before: what replays it, and the output that a replay fills."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = call()
    return graph.replay, output


def moved(tensors: Tensors, device: torch.device) -> Tensors:
    """A copy on `device` of a dataclass of tensors, some of which may be None."""
    fields = {field.name: getattr(tensors, field.name) for field in dataclasses.fields(tensors)}  # type: ignore[arg-type]
    copies = {name: part.to(device, copy=True) for name, part in fields.items() if part is not None}
    return dataclasses.replace(tensors, **copies)  # type: ignore[type-var]


def load(target: Tensors, source: Tensors) -> None:
    """Copy every tensor of one dataclass into those of another, which a CUDA graph reads."""
    for field in dataclasses.fields(target):  # type: ignore[arg-type]
        getattr(target, field.name).copy_(getattr(source, field.name))


def take_step(name: str, step: Callable[[], None], budget: Budget, report: dict[str, Any]) -> bool:
    """Run a step if there is time; whether nothing went wrong."""
    try:
        budget.check()
        step()
    except OutOfTime:
        report["left_out"].append(name)
    except Exception as error:  # the other steps may still tell something
        report["errors"][name] = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        return False
    return True


def is_lost(device: torch.device) -> bool:
    """Whether an error has broken the connection to the GPU, as an illegal address does."""
    try:
        torch.empty(1, device=device).zero_().item()
    except RuntimeError:
        return True
    return False
