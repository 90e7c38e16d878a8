"""Every fault of a device while a real engine serves: answers stay those of an engine without a pool."""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable

import pytest

from forebay.storage.device.faulty import FaultyDevice
from tests.engines.conftest import PROMPTS
from tests.engines.harness import BLOCK, PoolEngine, prompt

pytestmark = pytest.mark.engine

READ_FAULTS: dict[str, Callable[[FaultyDevice], None]] = {
    "EIO": lambda device: device.fail(errno.EIO),
    "one EIO": lambda device: device.fail(errno.EIO, count=1),
    "every third EIO": lambda device: device.fail(errno.EIO, every=3),
    "short read": lambda device: device.short(),
    "vanished": lambda device: device.vanish(),
    "hung": lambda device: device.hang(),
    "slow": lambda device: device.delay(0.2),
}
WRITE_FAULTS: dict[str, Callable[[FaultyDevice], None]] = {
    "EIO": lambda device: device.fail(errno.EIO, writes_only=True),
    "disk full": lambda device: device.fail(errno.ENOSPC, writes_only=True),
    "read-only": lambda device: device.fail(errno.EROFS, writes_only=True),
    "hung": lambda device: device.hang(),
    "vanished": lambda device: device.vanish(),
}


@pytest.mark.parametrize("fault", READ_FAULTS)
def test_loads(engine: PoolEngine, answers: list[list[int]], fault: str) -> None:
    engine.ask_all(PROMPTS)
    engine.forget()
    READ_FAULTS[fault](engine.faults["ssd0"])
    started = time.monotonic()
    assert [answer for answer, _ in engine.ask_all(PROMPTS)] == answers
    assert time.monotonic() - started < 30
    engine.recover()
    engine.forget()
    assert [answer for answer, _ in engine.ask_all(PROMPTS)] == answers


@pytest.mark.parametrize("fault", WRITE_FAULTS)
def test_stores(engine: PoolEngine, answers: list[list[int]], fault: str) -> None:
    WRITE_FAULTS[fault](engine.faults["ssd0"])
    WRITE_FAULTS[fault](engine.faults["ssd1"])
    assert [answer for answer, _ in engine.ask_all(PROMPTS)] == answers
    engine.settle()
    assert [answer for answer, _ in engine.ask_all(PROMPTS)] == answers
    engine.recover()
    engine.forget()
    assert [answer for answer, _ in engine.ask_all(PROMPTS)] == answers


def test_silent_corruption_is_a_miss(engine: PoolEngine, answers: list[list[int]]) -> None:
    engine.ask_all(PROMPTS)
    engine.forget()
    engine.faults["ssd0"].corrupt()
    assert [answer for answer, _ in engine.ask_all(PROMPTS)] == answers


def test_a_failed_load_is_not_tried_for_ever(engine: PoolEngine, answers: list[list[int]]) -> None:
    """The failed keys leave the index before the request is scheduled again."""
    engine.ask(PROMPTS[0])
    engine.forget()
    for device in engine.faults.values():
        device.fail(errno.EIO)
    before = engine.pool.stats()
    assert engine.ask(PROMPTS[0])[0] == answers[0]
    assert engine.pool.stats().lookups - before.lookups < 200


def test_only_what_failed_is_computed_again(engine: PoolEngine, answers: list[list[int]]) -> None:
    engine.ask(PROMPTS[0])
    engine.forget()
    engine.faults["ssd0"].fail(errno.EIO, count=1)
    engine.ask(PROMPTS[0])
    engine.forget()
    answer, cached = engine.ask(PROMPTS[0])
    assert answer == answers[0]
    assert cached == 8 * BLOCK


def test_quarantined_devices_get_nothing_new(engine: PoolEngine) -> None:
    engine.faults["ssd0"].fail(errno.EIO)
    for seed in range(300, 303):
        engine.ask(prompt(seed))
    engine.settle()
    before = used(engine)
    for seed in range(303, 306):
        engine.ask(prompt(seed))
    engine.settle()
    after = used(engine)
    assert after["ssd0"] <= before["ssd0"]
    assert after["ssd1"] > before["ssd1"]


def used(engine: PoolEngine) -> dict[str, int]:
    return {device.name: device.used_bytes for device in engine.pool.stats().devices}


def test_abort_at_every_state(engine: PoolEngine, answers: list[list[int]]) -> None:
    """Requests are aborted after 0, 1, 2, ... steps, cold and warm, with slow devices."""
    from vllm import SamplingParams

    engine.ask_all(PROMPTS)
    engine.forget()
    sampling = SamplingParams(max_tokens=8, temperature=0)
    for device in engine.faults.values():
        device.delay(0.02)
    for steps in range(12):
        for index, ids in enumerate((PROMPTS[0], prompt(400 + steps))):
            name = f"abort-{steps}-{index}"
            engine.llm.llm_engine.add_request(name, {"prompt_token_ids": ids}, sampling)
            for _ in range(steps):
                engine.llm.llm_engine.step()
            engine.llm.llm_engine.abort_request([name])
        engine.forget()
        assert engine.leases() == 0
    assert engine.ask(PROMPTS[0])[0] == answers[0]


def test_preemption(engine: PoolEngine) -> None:
    """More running tokens than KV blocks: vLLM preempts, flushes stores and resumes; the answers stay."""
    crowd = [prompt(seed, blocks=9, tail=100) for seed in range(500, 508)]
    alone = [engine.ask(ids, tokens=100)[0] for ids in crowd]
    engine.forget()
    together = [answer for answer, _ in engine.ask_all(crowd, tokens=100)]
    assert together == alone


def test_random_rounds_leave_nothing_behind(engine: PoolEngine) -> None:
    """Aborts, faults, resets and questions in random order."""
    from vllm import SamplingParams

    dice = random.Random(7)
    sampling = SamplingParams(max_tokens=2, temperature=0)
    expected: dict[int, list[int]] = {}
    for round_number in range(60):
        seed = 600 + dice.randrange(6)
        action = dice.randrange(5)
        if action == 0:
            dice.choice(list(engine.faults.values())).fail(errno.EIO, count=dice.randrange(1, 4))
        elif action == 1:
            engine.forget()
        elif action == 2:
            name = f"random-{round_number}"
            engine.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt(seed)}, sampling)
            for _ in range(dice.randrange(4)):
                engine.llm.llm_engine.step()
            engine.llm.llm_engine.abort_request([name])
        else:
            answer, _ = engine.ask(prompt(seed), tokens=2)
            assert answer == expected.setdefault(seed, answer)
    for device in engine.faults.values():
        device.clear()
    engine.forget()
    assert engine.leases() == 0
