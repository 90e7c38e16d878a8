"""A real `vllm serve` of a diffusion model, with no flag of ours, and OpenAI's client."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from forebay.bench.server import VllmServer
from tests.engines.diffusion_models import TEMPLATE, TINY

pytestmark = pytest.mark.engine
PROMPT = "The river was"
GREEDY: dict[str, Any] = {"model": "model", "temperature": 0}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    folder = tmp_path_factory.mktemp("server")
    template = folder / "template.jinja"
    template.write_text(TEMPLATE)
    arguments = ["--chat-template", str(template), "--dtype", "float32"]
    with VllmServer(TINY, None, folder / "log", arguments=arguments) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: VllmServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)


def complete(client: openai.OpenAI, **options: Any) -> Any:
    return client.completions.create(**{**GREEDY, "prompt": PROMPT, **options})


def idle(server: VllmServer, limit: float = 20) -> bool:
    """Whether the engine has nothing to do before `limit` seconds are over."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        if server.metrics("vllm:num_requests_running")["vllm:num_requests_running"] == 0:
            return True
        time.sleep(0.1)
    return False


def test_completions_stream_block_by_block(client: openai.OpenAI) -> None:
    whole = complete(client, max_tokens=96, extra_body={"ignore_eos": True})
    options = {"ignore_eos": True, "return_token_ids": True}
    chunks = [c for c in complete(client, max_tokens=96, stream=True, extra_body=options) if c.choices]
    assert [len(chunk.choices[0].token_ids) for chunk in chunks if chunk.choices[0].token_ids] == [32, 32, 32]
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 96


def test_chat_has_a_length_of_its_own(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "system", "content": "You are kind."}, {"role": "user", "content": "Hello"}]
    whole = client.chat.completions.create(model="model", messages=messages, extra_body={"ignore_eos": True})
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 256
    again = client.chat.completions.create(
        model="model", messages=messages, stream=True, extra_body={"ignore_eos": True}
    )
    assert "".join(c.choices[0].delta.content or "" for c in again if c.choices) == whole.choices[0].message.content


def test_logprobs(client: openai.OpenAI) -> None:
    found = complete(client, max_tokens=40, logprobs=2, extra_body={"ignore_eos": True}).choices[0].logprobs
    assert len(found.token_logprobs) == 40
    assert all(value <= 0 for value in found.token_logprobs)
    assert all(len(best) >= 1 for best in found.top_logprobs)


def test_stop_strings(client: openai.OpenAI) -> None:
    whole = complete(client, max_tokens=64, extra_body={"ignore_eos": True}).choices[0].text
    word = whole.split()[2]
    stopped = complete(client, max_tokens=64, stop=[word], extra_body={"ignore_eos": True}).choices[0]
    assert stopped.finish_reason == "stop"
    assert stopped.text == whole[: whole.index(word)]


def test_a_client_that_goes_away(client: openai.OpenAI, server: VllmServer) -> None:
    stream = complete(client, max_tokens=900, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    assert idle(server)


def test_many_at_once(client: openai.OpenAI) -> None:
    alone = [complete(client, prompt=f"{PROMPT} {word}", max_tokens=40).choices[0].text for word in ("a", "the", "in")]
    with ThreadPoolExecutor(12) as pool:
        prompts = [f"{PROMPT} {word}" for word in ("a", "the", "in")] * 4
        found = list(pool.map(lambda prompt: complete(client, prompt=prompt, max_tokens=40).choices[0].text, prompts))
    assert found == alone * 4


def test_seeds_and_several_answers(client: openai.OpenAI) -> None:
    two = complete(client, max_tokens=32, temperature=1.5, n=2, seed=3, extra_body={"ignore_eos": True})
    again = complete(client, max_tokens=32, temperature=1.5, n=2, seed=3, extra_body={"ignore_eos": True})
    texts = [choice.text for choice in two.choices]
    assert texts == [choice.text for choice in again.choices]
    assert len(set(texts)) == 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"vllm_xargs": {"stepz": 3}}, "stepz is unknown; known are steps"),
        ({"vllm_xargs": {"threshold": 2}}, "threshold is 2"),
        ({"use_beam_search": True, "n": 2}, "cannot do beam search"),
        ({"structured_outputs": {"regex": "a+"}}, "does not support structured_outputs"),
        ({"response_format": {"type": "json_object"}}, "does not support structured_outputs"),
        ({"presence_penalty": 1.0}, "does not support presence_penalty"),
        ({"top_k": 4, "temperature": 1}, "does not support top_k"),
        ({"echo": True, "logprobs": 1}, "does not support prompt_logprobs"),
        ({"kv_transfer_params": {"x": 1}}, "kv_transfer_params is unknown"),
    ],
)
def test_what_cannot_be_is_refused(client: openai.OpenAI, options: dict[str, Any], says: str) -> None:
    with pytest.raises(openai.BadRequestError, match=says):
        complete(client, max_tokens=8, extra_body=options)


def test_controls_and_metrics(client: openai.OpenAI, server: VllmServer) -> None:
    def steps() -> float:
        complete(client, max_tokens=4)
        time.sleep(1.2)
        complete(client, max_tokens=4)
        return server.metrics()["forebay:dlm_steps_total"]

    before = steps()
    xargs = {"steps": 8, "block": 8, "prefix": 2, "remasking": "entropy", "adaptive": True, "exact": False}
    complete(client, max_tokens=32, extra_body={"ignore_eos": True, "vllm_xargs": xargs})
    after = steps()
    assert 8 <= after - before <= 8 + 4 + 1
    shown = server.metrics()
    assert shown["forebay:dlm_prefix_misses_total"] >= 1
    assert shown["forebay:dlm_tokens_total"] > 0
    server.drop_engine_cache()


def test_prefixes_outlive_a_restart(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    pool = {
        "path": str(tmp_path / "state"),
        "devices": [{"name": "ssd", "kind": "file", "path": str(tmp_path / "kv"), "size": "32MiB", "buffered": True}],
    }
    settings = json.dumps({"forebay": {"pool": pool}})
    arguments = ["--chat-template", str(template), "--dtype", "float32", "--additional-config", settings]
    prompt = " ".join(f"word{number}" for number in range(60))
    answers, shown = [], []
    for _ in range(2):
        with VllmServer(TINY, None, tmp_path / "log", arguments=arguments) as server:
            for question in (" a?", " b?", " c?"):
                answers.append(server.ask(prompt + question, max_tokens=8, extra={"vllm_xargs": {"prefix": 64}}))
            time.sleep(1.2)
            server.ask("go on", max_tokens=1)
            shown.append(server.metrics("forebay:dlm"))
    first, second = shown
    assert [answer.cached_tokens for answer in answers] == [0, 64, 64, 64, 64, 64]
    assert [answer.text for answer in answers[:3]] == [answer.text for answer in answers[3:]]
    assert (first["forebay:dlm_prefix_misses_total"], second["forebay:dlm_prefix_misses_total"]) == (1, 0)
    assert second["forebay:dlm_prefix_restored_total"] == 1
    assert second["forebay:dlm_pool_bytes"] > 0


def test_the_log_is_clean(server: VllmServer) -> None:
    log = Path(server.log).read_text()
    assert "Traceback" not in log
