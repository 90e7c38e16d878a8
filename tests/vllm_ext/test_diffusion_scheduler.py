"""Scheduler and driver together, on the real runtime, without an engine around them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm import SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreOutputs, FinishReason
from vllm.v1.request import Request, RequestStatus
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from forebay.diffusion.depth import DepthTable
from forebay.diffusion.runtime import Runtime, RuntimeSettings
from forebay.diffusion.transformer import Transformer
from forebay.diffusion.weights import load
from forebay.vllm_ext.diffusion.driver import Driver
from forebay.vllm_ext.diffusion.messages import Counts
from forebay.vllm_ext.diffusion.metrics import PREFIX, DiffusionMetrics, RuntimeMetrics
from forebay.vllm_ext.diffusion.pace import MOST, Pace
from forebay.vllm_ext.diffusion.scheduler import DiffusionScheduler
from tests.engines.diffusion_models import TINY

WEIGHTS = load(TINY)
PROMPT = [850, 2934, 369, 614, 20, 30]


class Engine:
    """What vLLM's engine core does, in one process."""

    def __init__(self, *, sequences=2, policy="fcfs", request_bytes=None, finished=False, positions=256):
        model = SimpleNamespace(
            hf_config=SimpleNamespace(eos_token_id=0), max_model_len=positions, seed=0, get_vocab_size=lambda: 4096
        )
        config = SimpleNamespace(
            additional_config={"forebay": {"block": 4, "tokens_per_step": 2}},
            scheduler_config=SimpleNamespace(max_num_seqs=sequences, policy=policy),
            model_config=model,
        )
        self.scheduler = DiffusionScheduler(
            config, None, None, block_size=1, include_finished_set=finished, log_stats=True
        )
        settings = RuntimeSettings(batch=sequences, request_bytes=request_bytes)
        runtime = Runtime(Transformer(WEIGHTS), DepthTable({0: 1}, 6, "test"), settings)
        self.driver = Driver(runtime)

    @property
    def runtime(self):
        return self.driver.runtime

    def add(self, name, *, priority=0, arrival=0.0, client=0, prompt=PROMPT, resumable=False, **params):
        params = SamplingParams(**{"temperature": 0, "max_tokens": 8, "ignore_eos": True, **params})
        request = Request(
            name, list(prompt), params, None, client, arrival, priority=priority, resumable=resumable
        )  # fmt: skip
        self.scheduler.add_request(request)

    def step(self, between=lambda: None):
        """One step; `between` happens while the workers are busy."""
        step = self.scheduler.schedule()
        done = self.driver.run(step)
        between()
        return self.scheduler.update_from_output(step, done)

    def run(self, limit=200):
        """All outputs until there is nothing to do."""
        found = []
        while self.scheduler.has_requests():
            found += [one for outputs in self.step().values() for one in outputs.outputs]
            limit -= 1
            assert limit, "it does not end"
        return found


def ends(outputs):
    return [one.request_id for one in outputs if one.finished]


def test_blocks_come_in_order():
    engine = Engine()
    engine.add("a", max_tokens=10)
    found = engine.run()
    assert [len(one.new_token_ids) for one in found] == [4, 4, 2]
    assert [one.finish_reason for one in found] == [None, None, FinishReason.LENGTH]
    first = found[0]
    assert first.prefill_stats.num_prompt_tokens == len(PROMPT)
    assert {event.type.name for event in first.events} == {"QUEUED", "SCHEDULED"}
    assert engine.runtime.idle


def test_an_answer_of_one_pass_has_started_too():
    engine = Engine()
    engine.add("a", max_tokens=1)
    (found,) = engine.run()
    assert {event.type.name for event in found.events} == {"QUEUED", "SCHEDULED"}
    assert found.prefill_stats.num_prompt_tokens == len(PROMPT)


def test_no_more_than_may_run_and_in_order():
    engine = Engine(sequences=2)
    for name in "abcde":
        engine.add(name)
    engine.step()
    assert len(engine.runtime.running) == 2
    assert engine.scheduler.get_request_counts() == (2, 3)
    assert ends(engine.run()) == list("abcde")


def test_priority():
    engine = Engine(sequences=1, policy="priority")
    engine.add("first", arrival=1.0)
    engine.step()
    for name, priority, arrival in (("late", 1, 2.0), ("urgent", 0, 3.0), ("early", 1, 1.5)):
        engine.add(name, priority=priority, arrival=arrival)
    assert ends(engine.run()) == ["first", "urgent", "early", "late"]


def test_memory_admits_one_after_the_other():
    size = Engine().runtime.bytes_per_token * (len(PROMPT) + 8)
    engine = Engine(sequences=4, request_bytes=2 * size)
    for name in "abcd":
        engine.add(name)
    engine.step()
    assert (len(engine.runtime.running), len(engine.runtime.waiting)) == (2, 2)
    assert engine.scheduler.get_kv_cache_usage() == 1.0
    engine.add("e")
    engine.step()
    assert len(engine.scheduler.waiting) == 1, "handed over when the runtime has room"
    assert ends(engine.run()) == list("abcde")


def test_a_request_that_never_fits_is_refused():
    engine = Engine(request_bytes=Engine().runtime.bytes_per_token * 10)
    engine.add("big")
    engine.add("small", prompt=PROMPT[:2])
    found = engine.run()
    assert {one.request_id: one.finish_reason for one in found if one.finished} == {
        "big": FinishReason.ERROR,
        "small": FinishReason.LENGTH,
    }
    assert "14 tokens need" in next(one.stop_reason for one in found if one.request_id == "big")


@pytest.mark.parametrize("options", [{"resumable": True}, {"extra_args": {"stepz": 1}}])
def test_what_the_front_end_let_through_is_refused(options):
    engine = Engine()
    engine.add("a", **options)
    (found,) = engine.run()
    assert found.finish_reason == FinishReason.ERROR
    assert found.stop_reason


def test_abort_while_the_workers_are_busy():
    engine = Engine()
    engine.add("a", max_tokens=4)
    engine.add("b", max_tokens=40)

    def abort():
        assert [r.request_id for r in engine.scheduler.finish_requests(["b"], RequestStatus.FINISHED_ABORTED)] == ["b"]

    engine.step(between=abort)
    assert engine.scheduler.has_finished_requests()
    assert ends(engine.run()) == ["a"]
    assert engine.runtime.idle
    assert not engine.scheduler.has_requests()


def test_abort_all_none_and_unknown():
    engine = Engine(sequences=1)
    for name in "abc":
        engine.add(name)
    engine.step()
    finish = engine.scheduler.finish_requests
    assert finish([], RequestStatus.FINISHED_ABORTED) == []
    assert finish("nobody", RequestStatus.FINISHED_ABORTED) == []
    assert len(finish(None, RequestStatus.FINISHED_ABORTED)) == 3
    engine.run()
    assert engine.runtime.idle
    assert not engine.scheduler.waiting


def test_an_end_token_frees_the_runtime():
    engine = Engine()
    engine.add("a", max_tokens=200)
    first = engine.run()[0].new_token_ids[1]
    engine.add("b", max_tokens=200, stop_token_ids=[first])
    found = engine.run()
    assert (found[-1].finish_reason, found[-1].stop_reason) == (FinishReason.STOP, first)
    assert engine.runtime.idle


def test_pauses():
    engine = Engine()
    engine.add("a", max_tokens=40)
    engine.step()
    engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    engine.add("b")
    assert ends(engine.run()) == ["a"], "those that run go on"
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert not engine.scheduler.has_requests()
    passes = engine.runtime.statistics.steps
    engine.step()
    assert engine.runtime.statistics.steps == passes
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert ends(engine.run()) == ["b"]


def test_prefixes_are_forgotten():
    engine = Engine()
    engine.add("a", extra_args={"prefix": 5})
    engine.run()
    assert len(engine.runtime.cache) == 1
    assert engine.scheduler.reset_prefix_cache()
    assert engine.scheduler.has_requests()
    engine.run()
    assert len(engine.runtime.cache) == 0
    engine.add("b", max_tokens=40)
    engine.step()
    assert not engine.scheduler.reset_prefix_cache(), "one is running"


def test_a_prefix_longer_than_the_prompt_is_the_prompt():
    engine = Engine()
    engine.add("a", extra_args={"prefix": 500})
    assert ends(engine.run()) == ["a"]


def test_prefixes_are_found():
    engine, shared = Engine(), list(range(100, 180))
    for name in "abc":
        engine.add(name, prompt=[*shared, ord(name), 5])
        engine.run()
    assert engine.runtime.cache.statistics.misses == 1, "from the second request on"
    assert engine.runtime.cache.statistics.hits == 1


def test_who_found_the_prefix():
    engine, shared = Engine(sequences=4), list(range(100, 180))
    for name in "abc":
        engine.add(name, prompt=[*shared, ord(name), 5], extra_args={"prefix": 80})
    cached = {one.request_id: one.prefill_stats.num_cached_tokens for one in engine.run() if one.prefill_stats}
    assert cached == {"a": 0, "b": 80, "c": 80}


def test_nothing_stays_of_many_requests():
    engine = Engine(sequences=8)
    for number in range(200):
        engine.add(str(number), max_tokens=1 + number % 5, extra_args={"prefix": number % 3})
        if number % 7 == 0:
            engine.step()
            engine.scheduler.finish_requests([str(number - 1)], RequestStatus.FINISHED_ABORTED)
    engine.run(limit=2000)
    scheduler, driver = engine.scheduler, engine.driver
    held = (scheduler.requests, scheduler.sent, scheduler.started, scheduler._leaving, scheduler._refused)
    assert not any(held)
    assert not driver._queued
    assert engine.runtime.idle


def test_clients_get_their_own():
    engine = Engine(finished=True)
    engine.add("a", client=0)
    engine.add("b", client=1)
    found: dict[int, set[str]] = {}
    finished: dict[int, set[str]] = {}
    while engine.scheduler.has_requests():
        for client, outputs in engine.step().items():
            found.setdefault(client, set()).update(one.request_id for one in outputs.outputs)
            finished.setdefault(client, set()).update(outputs.finished_requests or ())
    assert found == finished == {0: {"a"}, 1: {"b"}}


def test_seeds_of_requests_without_one_differ_and_repeat():
    def answers():
        engine = Engine()
        for name in "ab":
            engine.add(name, temperature=1.5, max_tokens=16)
        found: dict[str, list[int]] = {"a": [], "b": []}
        for one in engine.run():
            found[one.request_id] += one.new_token_ids
        return found

    first = answers()
    assert first["a"] != first["b"]
    assert answers() == first


def test_metrics_arrive_as_they_were_sent():
    metrics = RuntimeMetrics()
    metrics.note(Counts(prefix_hits=2, tokens=40, steps=20, depths={1: 2, 3: 1}, state_bytes=7))
    metrics.note(Counts(prefix_hits=3, tokens=60, steps=25, depths={1: 3, 3: 1}, state_bytes=9))
    sent = EngineCoreOutputs()
    sent.scheduler_stats = Engine().scheduler.make_stats()
    sent.scheduler_stats.kv_connector_stats = metrics.take()
    received = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(sent))
    data = received.scheduler_stats.kv_connector_stats
    reduced = DiffusionMetrics.build_kv_connector_stats(data).reduce()
    assert reduced[PREFIX + "prefix_hits"] == 3
    assert reduced[PREFIX + "reused_layers_count"] == 4
    assert reduced[PREFIX + "reused_layers_sum"] == 6
    assert metrics.take() is None


def test_pace_follows_the_measured_time():
    pace = Pace()
    assert pace.passes == 1
    pace.start()
    pace.end(1)
    assert pace.passes == MOST
    pace._started -= 1.0
    pace.end(2)
    assert pace.passes == 1
