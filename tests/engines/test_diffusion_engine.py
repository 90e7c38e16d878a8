"""Real vLLM on diffusion models: what the bare runtime says, and everything around it."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.engines.diffusion_models import TINY, dream_model, llada_model
from tests.engines.diffusion_scripts import REFUSED
from tests.engines.harness import MODEL
from tests.engines.isolated import run_isolated

pytestmark = pytest.mark.engine
run: Callable[..., Any] = partial(run_isolated, module="diffusion_scripts")

NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
OFFLOADING = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
IMPOSSIBLE: dict[str, tuple[dict[str, Any], str]] = {
    "pipeline": ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size 2 does not work"),
    "adapters": ({"enable_lora": True}, "--enable-lora does not work"),
    "quantization": ({"quantization": "fp8"}, "--quantization fp8 does not work"),
    "speculation": ({"speculative_config": NGRAM}, "--speculative-config does not work"),
    "connector": ({"kv_transfer_config": OFFLOADING}, "--kv-transfer-config does not work"),
    "key": ({"additional_config": {"forebay": {"blok": 3}}}, "blok is unknown; known are"),
    "value": ({"additional_config": {"forebay": {"block": 0}}}, "block is 0; input should be greater"),
}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What one engine answers to everything."""
    return run("one_engine", {})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Diffusion models in every layout, and models that are none."""
    made = tmp_path_factory.mktemp("models")
    ordinary = made / "ordinary"
    ordinary.mkdir()
    config = json.loads((TINY / "config.json").read_text())
    del config["is_causal"], config["mask_token_id"], config["diffusion"]
    (ordinary / "config.json").write_text(json.dumps(config))
    diffusion = {"llada": llada_model(made / "llada"), "dream": dream_model(made / "dream"), "llama": TINY}
    return {name: str(path) for name, path in {**diffusion, "ordinary": ordinary, "moe": MODEL}.items()}


@pytest.fixture(scope="module")
def configurations(folders: dict[str, str]) -> dict[str, Any]:
    return run("configurations", {"folders": folders, "arguments": [options for options, _ in IMPOSSIBLE.values()]})


def test_answers_are_the_runtimes(found: dict[str, Any]) -> None:
    answers = found["answers"]
    assert answers["found"] == answers["expected"]
    assert answers["controlled"] == answers["controlled_expected"]


def test_seeds(found: dict[str, Any]) -> None:
    one, again, bare = found["sampled"]["seven"]
    assert one == again == bare
    assert found["sampled"]["eight"] != one
    first, second = found["sampled"]["unseeded"]
    assert first != second


def test_two_answers_at_once_differ(found: dict[str, Any]) -> None:
    first, second = found["sampled"]["two"]
    assert first != second


def test_logprobs_of_committed_tokens(found: dict[str, Any]) -> None:
    logprobs = found["logprobs"]
    assert logprobs["values"] == pytest.approx(logprobs["expected"], abs=1e-4)
    assert len(logprobs["tokens"]) == len(logprobs["values"]) == 40
    for rank, count in zip(logprobs["ranks"], logprobs["counts"], strict=True):
        assert count == (2 if rank <= 2 else 3)


def test_endings(found: dict[str, Any]) -> None:
    endings = found["endings"]
    ids, reason, _, _ = endings["whole"]
    assert (len(ids), reason) == (40, "length")
    stopped_ids, reason, stop_reason, text = endings["stopped"]
    assert (reason, stop_reason) == ("stop", endings["stop"])
    assert endings["stop"] not in text
    assert stopped_ids == ids[: len(stopped_ids)]
    first = ids.index(ids[3]) + 1
    assert endings["token"][:3] == [ids[:first], "stop", ids[3]]
    assert endings["least"][0] == ids
    assert len(endings["one"]) == 1


@pytest.mark.parametrize(("phase", "running"), [("waiting", 0), ("running", 4), ("streaming", 4)])
def test_aborts_leave_nothing(found: dict[str, Any], phase: str, running: int) -> None:
    state = found["aborts"][phase]
    assert state["held"] == [running, 0, 6]
    assert state["left"] == [0, 0, 0, 0]
    assert state["done"]
    assert state["seen"] == (phase == "streaming")


def test_first_come_first_served(found: dict[str, Any]) -> None:
    assert found["order"] == [str(number) for number in range(8)]


def test_prefixes_are_reused_and_counted(found: dict[str, Any]) -> None:
    prefixes = found["prefixes"]
    size, shown = prefixes["prefix"], prefixes["metrics"]
    assert prefixes["cached"] == [0, size, 0], "miss, hit, miss after a reset"
    assert prefixes["automatic"] == [0, 0, size], "nobody can know at the first, the second computes, the third finds"
    assert prefixes["exact"] == 0
    assert shown["vllm:prefix_cache_hits_total"] >= size
    assert shown["forebay:dlm_prefix_hits_total"] >= 1
    assert shown["forebay:dlm_prefix_misses_total"] >= 2
    assert shown["forebay:dlm_reused_layers_sum"] >= 3
    assert shown["forebay:dlm_state_bytes"] > 0
    assert 1 < shown["forebay:dlm_tokens_per_step"] < 4


@pytest.mark.parametrize("name", [*REFUSED, "beam"])
def test_requests_are_refused_by_name(found: dict[str, Any], name: str) -> None:
    said = found["refusals"][name]
    assert said.startswith("VLLMValidationError: ")
    assert ("beam search" if name == "beam" else name) in said
    assert "\n" not in said


def test_answers_end_at_the_last_position(found: dict[str, Any]) -> None:
    assert found["refusals"]["long"] == "24"


@pytest.mark.parametrize("name", ["llada", "dream", "llama"])
def test_diffusion_models_get_our_worker(configurations: dict[str, Any], name: str) -> None:
    assert all("forebay.vllm_ext.diffusion" in one for one in configurations["classes"][name])


@pytest.mark.parametrize("name", ["ordinary", "moe"])
def test_other_models_are_as_they_were(configurations: dict[str, Any], name: str) -> None:
    assert not any("forebay" in one for one in configurations["classes"][name])


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_engines_that_cannot_be(configurations: dict[str, Any], name: str) -> None:
    said = configurations["refused"][list(IMPOSSIBLE).index(name)]
    assert IMPOSSIBLE[name][1] in said


@pytest.mark.parametrize(("name", "dtype"), [("llada", "float32"), ("dream", "bfloat16")])
def test_families(folders: dict[str, str], name: str, dtype: str) -> None:
    found = run("family", {"folder": folders[name], "dtype": dtype})
    assert found["found"] == found["expected"]
    assert found["prompt"] == "<|im_start|>hello there<|im_end|>"
    assert found["chat"] <= 256 - 5


def test_two_ranks(tmp_path: Path) -> None:
    device = {"name": "ssd", "kind": "file", "path": str(tmp_path / "kv"), "size": "32MiB", "buffered": True}
    found = run("two_ranks", {"pool": {"path": str(tmp_path / "state"), "devices": [device]}})
    for ours, expected in found["pairs"]:
        assert ours == expected
    assert found["cached"] == [0, found["prefix"], found["prefix"]], "computed, in memory, in both ranks' pools"
    assert len(list(tmp_path.glob("kv.rank*"))) == 2


def test_no_remote_code(folders: dict[str, str]) -> None:
    """It would have raised: see `diffusion_models`."""
    assert (Path(folders["dream"]) / "tokenization_dream.py").exists()
