"""Prefix states in a pool, in front of it a cache: restarts, kill -9, and anything in any order."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from forebay.diffusion.cache import PrefixCache
from forebay.diffusion.prefix import PrefixStates
from forebay.vllm_ext.diffusion.states import PoolStates
from tests.diffusion.test_state_format import same
from tests.vllm_ext.statekit import (
    CAPACITY,
    FORM,
    MODEL,
    TRANSFORMER,
    Stores,
    config,
    fresh,
    get,
    prefix,
    put,
    until,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def run(folder: Path, *arguments: object) -> subprocess.Popen[str]:
    """`child` in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.vllm_ext.statekit", str(folder), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=MODEL.parents[2], env=environment)


def test_restarts_find_everything(tmp_path: Path) -> None:
    for hits in (0, 5):
        assert run(tmp_path, "once").communicate(timeout=60)[0].split() == [str(hits)]


def test_kill_9_while_writing(tmp_path: Path) -> None:
    """What was reported is there, and all that is there is right."""
    process = run(tmp_path, "forever")
    assert process.stdout is not None
    written = {int(process.stdout.readline()) for _ in range(13)}
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    store = PoolStates.open(config(tmp_path), MODEL, TRANSFORMER)
    for number in range(40):
        expected = fresh(prefix(number), 1, 3)
        found = get(store, expected)
        assert found is not None or number not in written
        assert found is None or same(found, expected) or (list(found.states) == [1] and number not in written)
    assert store.statistics.failed_loads == 0
    store.close()


class CacheMachine(RuleBasedStateMachine):
    """A cache before a pool, both too small, restarts, damage and faults: what a request gets is what it would have
    computed."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
        self.stores = Stores(Path(self.folder.name))
        self.held: list[PrefixStates] = []
        self.start()

    def start(self) -> None:
        faults = {"deadline": "2s", "errors": 3, "probation": "0.01s"}
        self.store = self.stores.reopen(pool=config(self.stores.folder, size="1MiB", faults=faults))
        self.cache = PrefixCache(TRANSFORMER, 300_000, self.store)

    @rule(number=st.integers(0, 9), depth=st.integers(1, 5))
    def come(self, number: int, depth: int) -> None:
        states = self.cache.acquire(prefix(number), depth)
        expected = fresh(prefix(number), depth)
        assert torch.equal(states.tokens_P, prefix(number))
        assert states.holds(depth, FORM.layers)
        for mine, theirs in zip(states.known, expected.known, strict=False):
            assert torch.equal(mine.keys, theirs.keys)
            assert torch.equal(mine.values, theirs.values)
        assert depth >= FORM.layers - 1 or torch.equal(states.states[depth], expected.states[depth])
        self.held.append(states)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        self.cache.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @rule()
    def settle(self) -> None:
        until(lambda: not self.store._io._writes and self.store._io._writing is None)

    @rule()
    def restart(self) -> None:
        self.held.clear()
        self.start()

    @rule()
    def damage(self) -> None:
        self.settle()
        self.stores.device.corrupt()

    @rule(count=st.integers(1, 4), every=st.integers(1, 5))
    def fail(self, count: int, every: int) -> None:
        self.stores.device.fail(errno.EIO, count=count, every=every)

    @invariant()
    def bounded(self) -> None:
        assert self.store.bytes <= 1 << 20
        assert not self.store._io.broken

    def teardown(self) -> None:
        self.stores.close()
        self.folder.cleanup()


TestCacheOnAPool = CacheMachine.TestCase
TestCacheOnAPool.settings = settings(max_examples=12, stateful_step_count=30, deadline=None)


class _Ranks:
    """What `Transformer.average` returns where the other rank has something else."""

    def __init__(self, other: list[float]) -> None:
        self.other = other

    def average(self, values: list[float]) -> list[float]:
        other = self.other if len(values) > 1 else [0.0]
        return [(one + two) / 2 for one, two in zip(values, other, strict=True)]


@pytest.mark.parametrize("other", [[-1.0] * 8, [4.0, -1.0, 0, 0, 0, 1.0, 0, 0]])
def test_ranks_that_have_not_the_same_compute(
    stores: Stores, other: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one rank would wait for a sum that the other takes no part in."""
    store = stores.open()
    put(store, fresh(prefix(3), 2))
    cache = PrefixCache(TRANSFORMER, CAPACITY, store)
    monkeypatch.setattr(TRANSFORMER, "average", _Ranks(other).average)
    cache.acquire(prefix(3), 2)
    assert (cache.statistics.misses, cache.statistics.restored) == (1, 0)
