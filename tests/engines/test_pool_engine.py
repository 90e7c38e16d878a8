"""The pool behind a real engine: what is warm is found, and what is found is right."""

from __future__ import annotations

import pytest

from tests.engines.conftest import PROMPTS
from tests.engines.harness import BLOCK, PoolEngine, prompt

pytestmark = pytest.mark.engine


def test_warm_answers_are_the_cold_ones(engine: PoolEngine, answers: list[list[int]]) -> None:
    for ids, expected in zip(PROMPTS, answers, strict=True):
        answer, cached = engine.ask(ids)
        assert (answer, cached) == (expected, 0)
    engine.forget()
    for ids, expected in zip(PROMPTS, answers, strict=True):
        answer, cached = engine.ask(ids)
        assert answer == expected
        assert cached == len(ids) // BLOCK * BLOCK
    used = {device.name for device in engine.pool.stats().devices if device.used_bytes}
    assert used == {"ram", "ssd0", "ssd1"}


def test_many_at_once(engine: PoolEngine, answers: list[list[int]]) -> None:
    for _ in range(3):
        assert [answer for answer, _ in engine.ask_all(PROMPTS)] == answers
        engine.forget()


def test_a_shared_prefix_is_found_by_other_prompts(engine: PoolEngine) -> None:
    shared = prompt(100, blocks=4, tail=0)
    first, second = shared + prompt(101, blocks=2), shared + prompt(102, blocks=2)
    engine.ask(first)
    engine.forget()
    _, cached = engine.ask(second)
    assert cached == 4 * BLOCK


def test_salts_do_not_share(engine: PoolEngine, answers: list[list[int]]) -> None:
    engine.ask(PROMPTS[0], cache_salt="alice")
    engine.forget()
    answer, cached = engine.ask(PROMPTS[0], cache_salt="bob")
    assert (answer, cached) == (answers[0], 0)
    engine.forget()
    answer, cached = engine.ask(PROMPTS[0], cache_salt="alice")
    assert (answer, cached) == (answers[0], 8 * BLOCK)


def test_the_pool_evicts_and_stays_right(engine: PoolEngine) -> None:
    """More prompts than the pool holds: old ones miss, recent ones hit, answers never change."""
    crowd = [prompt(seed, blocks=14) for seed in range(200, 214)]
    first = [engine.ask(ids, tokens=4)[0] for ids in crowd]
    engine.settle()
    for device in engine.pool.stats().devices:
        assert device.used_bytes <= device.capacity_bytes
    assert engine.pool.stats().evictions > 0
    engine.forget()
    again = [engine.ask(ids, tokens=4) for ids in reversed(crowd)]
    assert [answer for answer, _ in again] == first[::-1]
    assert again[0][1] > 0
    assert min(cached for _, cached in again) == 0


def test_reset_with_external_empties_the_pool(engine: PoolEngine) -> None:
    engine.ask(PROMPTS[0])
    engine.settle()
    assert engine.llm.reset_prefix_cache(reset_connector=True)
    assert engine.pool.stats().chunks == 0
    assert engine.ask(PROMPTS[0])[1] == 0


def test_a_request_may_rule_the_pool_out(engine: PoolEngine, answers: list[list[int]]) -> None:
    from vllm import SamplingParams

    engine.ask(PROMPTS[0])
    engine.forget()
    sampling = SamplingParams(max_tokens=8, temperature=0, extra_args={"kv_transfer_params": {"kv_load_tiers": []}})
    (output,) = engine.llm.generate({"prompt_token_ids": PROMPTS[0]}, sampling, use_tqdm=False)
    assert output.num_cached_tokens == 0
    assert list(output.outputs[0].token_ids) == answers[0]


def test_metrics_name_every_device(engine: PoolEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.ask(PROMPTS[0])
    engine.forget()
    engine.manager.metrics.take()
    monkeypatch.setattr(engine.manager.metrics, "take", lambda: None)
    engine.ask(PROMPTS[0])
    engine.settle()
    stats = engine.manager.metrics._stats.data["data"]
    assert {labels[0] for labels in stats["forebay:kv_device_read_bytes"]} == {"ram", "ssd0", "ssd1"}
    assert sum(stats["forebay:kv_device_read_bytes"].values()) == 8 * 256 * 1024 * 2
    assert stats["forebay:kv_stripe_skew_seconds"][()]
