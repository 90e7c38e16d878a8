"""Stores of prefix states on small pools, with devices that fail on command."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from forebay.diffusion.cache import PrefixCache, prefix_key
from forebay.diffusion.prefix import PrefixStates
from forebay.diffusion.state_format import StateFormat
from forebay.diffusion.transformer import Transformer
from forebay.diffusion.weights import load
from forebay.storage.config import PoolConfig
from forebay.storage.device.faulty import FaultyDevice
from forebay.storage.lanes import open_lane
from forebay.storage.pool import Pool
from forebay.vllm_ext.diffusion.states import PoolStates, namespace

MODEL = Path(__file__).parents[2] / "tests/assets/tinydlm-prefix"
TRANSFORMER = Transformer(load(MODEL))
FORM = StateFormat.of(TRANSFORMER)
STRIPE = 16 << 10
CAPACITY = 1 << 30
"""Of a cache that is no limit."""


def config(folder: Path, size: str = "32MiB", **changes: object) -> PoolConfig:
    device = {"name": "ssd", "kind": "file", "size": size, "path": folder / "ssd.kv", "buffered": True}
    data = {"path": folder / "pool", "stripe": STRIPE, "devices": [device], "faults": {"deadline": "5s"}, **changes}
    return PoolConfig.model_validate(data)


def prefix(number: int) -> torch.Tensor:
    return torch.arange(number, number + 20 + number)


def fresh(tokens_P: torch.Tensor, *depths: int) -> PrefixStates:
    states = PrefixStates(tokens_P)
    for depth in depths:
        states.deepen(TRANSFORMER, depth)
    return states


class Stores:
    """Opens stores in one folder, with devices that fail on command, and closes them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.opened: list[PoolStates] = []
        self.device: FaultyDevice

    def open(self, pool: PoolConfig | None = None, form: StateFormat = FORM, model: Path = MODEL) -> PoolStates:
        pool = pool or config(self.folder)
        space = namespace(model, TRANSFORMER.config, form.dtype, model.name)
        engine = open_lane(pool)
        engine.devices[-1] = self.device = FaultyDevice(engine.devices[-1])
        engine._monitors[-1].device = self.device
        engine._poller.register(self.device.fileno())
        self.opened.append(PoolStates(Pool.open(pool, space), engine, form))
        return self.opened[-1]

    def reopen(self, **settings: object) -> PoolStates:
        self.close()
        return self.open(**settings)  # type: ignore[arg-type]

    def close(self) -> None:
        for store in self.opened:
            store.close()
        self.opened.clear()


def put(store: PoolStates, states: PrefixStates) -> None:
    """And wait until it is written, or has failed."""
    store.put(prefix_key(states.tokens_P), states)
    until(lambda: store._io.waiting(prefix_key(states.tokens_P)) is None)


def get(store: PoolStates, states: PrefixStates) -> PrefixStates | None:
    return store.get(prefix_key(states.tokens_P), states.tokens_P)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def child(folder: str, what: str) -> None:
    """`once`: acquire some prefixes and say how many hits; `forever`: write one after the other, and say which."""
    store = PoolStates.open(config(Path(folder)), MODEL, TRANSFORMER)
    if what == "once":
        cache = PrefixCache(TRANSFORMER, CAPACITY, store)
        for number in range(5):
            assert torch.equal(cache.acquire(prefix(number), 3).states[3], fresh(prefix(number), 3).states[3])
        print(cache.statistics.hits)
        store.close()
    number = 0
    while what == "forever":
        put(store, fresh(prefix(number % 40), 1, 3))
        print(number % 40, flush=True)
        number += 1


if __name__ == "__main__":
    child(*sys.argv[1:])
