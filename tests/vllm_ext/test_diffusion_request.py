"""What requests and servers may say about diffusion models, and what is refused."""

from __future__ import annotations

import pytest
from vllm import SamplingParams

from forebay.diffusion.errors import DiffusionError
from forebay.vllm_ext.diffusion.check import RequestCheck
from forebay.vllm_ext.diffusion.config import ServingConfig, read_config
from forebay.vllm_ext.diffusion.ending import Ending, find_end
from forebay.vllm_ext.diffusion.engine import EngineSettings
from forebay.vllm_ext.diffusion.request import check_params, make_settings, read_options

SERVER = ServingConfig()


def settings(server=SERVER, length=64, **params):
    return make_settings(SamplingParams(**params), server, length, seed=5, vocabulary=100)


def test_defaults_are_the_papers():
    found = settings(length=256)
    assert (found.steps, found.block, found.refresh, found.remasking) == (128, 32, 16, "confidence")
    assert (found.block_cache, found.exact, found.adaptive, found.logprobs) == ("none", False, False, None)


@pytest.mark.parametrize(("length", "steps"), [(1, 1), (2, 1), (7, 4), (100, 50), (256, 128)])
def test_steps_follow_the_length(length, steps):
    assert settings(length=length).steps == steps


def test_request_before_server_before_default():
    server = ServingConfig(block=8, refresh=4, tokens_per_step=1)
    found = settings(server, extra_args={"block": 16, "exact": 1})
    assert (found.block, found.refresh, found.steps, found.exact) == (16, 4, 64, True)


def test_sampling_parameters():
    found = settings(temperature=0.5, top_p=0.9, seed=11, logprobs=3)
    assert (found.temperature, found.top_p, found.seed, found.logprobs) == (0.5, 0.9, 11, 3)
    assert settings().seed == 5
    assert settings(logprobs=-1).logprobs == 100


@pytest.mark.parametrize(("params", "ignored"), [({}, False), ({"ignore_eos": True}, True), ({"min_tokens": 3}, True)])
def test_who_looks_for_the_end(params, ignored):
    assert settings(**params).ignore_end == ignored


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"stepz": 1}, "stepz is unknown; known are steps, block, threshold"),
        ({"steps": 0}, "steps is 0; input should be greater than or equal to 1"),
        ({"threshold": 1}, "threshold is 1; input should be less than 1"),
        ({"remasking": "luck"}, "remasking is 'luck'; input should be 'confidence'"),
        ({"exact": "perhaps"}, "exact is 'perhaps'; input should be a valid boolean"),
        ({"prefix": -1}, "prefix is -1; input should be greater than or equal to 0"),
        ({"kv_transfer_params": {}}, "kv_transfer_params is unknown"),
    ],
)
def test_wrong_options_are_one_line(extra, says):
    with pytest.raises(DiffusionError) as error:
        read_options(extra)
    assert str(error.value).startswith(says)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"frequency_penalty": 0.1}, "frequency_penalty"),
        ({"min_p": 0.2}, "min_p"),
        ({"top_k": 3}, "top_k"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"logit_bias": {1: 2.0}}, "logit_bias"),
        ({"bad_words": ["no"]}, "bad_words"),
        ({"allowed_token_ids": [4]}, "allowed_token_ids"),
        ({"logprobs": 4, "max_tokens": 1, "detokenize": False, "watermarking": False}, "beam search"),
    ],
)
def test_what_cannot_be(params, name):
    with pytest.raises(ValueError, match=name):
        RequestCheck.validate_params(SamplingParams(**params))


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0, "top_k": 20},
        {"n": 2, "seed": 1, "stop": ["x"], "stop_token_ids": [4], "min_tokens": 2, "logprobs": 5},
        {"max_tokens": 1, "logprobs": 2},
        {"extra_args": {"steps": 4, "threshold": 0.9, "block_cache": "dual", "prefix": 0, "adaptive": True}},
    ],
)
def test_what_can(params):
    check_params(SamplingParams(**params))


@pytest.mark.parametrize(
    ("additional", "says"),
    [
        ({"forebay": {"blok": 1}}, "blok is unknown; known are length, tokens_per_step, block"),
        ({"forebay": {"rule": "mine"}}, "rule is 'mine'"),
        ({"forebay": {"cache": "lots"}}, "cache is 'lots'"),
        ({"forebay": [1]}, "give an object"),
    ],
)
def test_wrong_server_settings_are_one_line(additional, says):
    with pytest.raises(DiffusionError, match=says) as error:
        read_config(additional)
    assert "\n" not in str(error.value)


def test_server_settings():
    assert read_config({"other": 1}) == read_config({}) == SERVER
    assert read_config({"forebay": {"cache": "2GiB", "rule": "paper"}}).cache == 2 << 30


@pytest.mark.parametrize(
    ("params", "tokens", "before", "last", "expected"),
    [
        ({}, [5, 6], 0, False, (None, 2, None)),
        ({}, [5, 6], 0, True, (Ending.LENGTH, 2, None)),
        ({}, [5, 0, 6], 0, True, (Ending.STOP, 2, None)),
        ({"ignore_eos": True}, [5, 0, 6], 0, False, (None, 3, None)),
        ({"stop_token_ids": [6]}, [5, 6, 0], 3, False, (Ending.STOP, 2, 6)),
        ({"stop_token_ids": [6], "ignore_eos": True}, [0, 6], 0, False, (Ending.STOP, 2, 6)),
        ({"min_tokens": 4}, [0, 5, 0], 2, False, (Ending.STOP, 3, None)),
        ({"min_tokens": 9}, [0, 5, 0], 2, True, (Ending.LENGTH, 3, None)),
    ],
)
def test_endings(params, tokens, before, last, expected):
    assert find_end(SamplingParams(**params), (0,), tokens, before, last) == expected


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["-pp", "2"], "--pipeline-parallel-size 2"),
        (["--pipeline_parallel_size=4"], "--pipeline-parallel-size 4"),
        (["--enable-lora"], "--enable-lora"),
        (["--quantization", "fp8"], "--quantization fp8"),
        (["--speculative-config", "{}"], "--speculative-config"),
        (["--kv-transfer-config", "{}"], "--kv-transfer-config"),
        (["--load-format", "dummy"], "--load-format dummy"),
    ],
)
def test_engine_options_that_do_not_work(options, says):
    with pytest.raises(DiffusionError, match=says) as error:
        EngineSettings.of_command_line(options).check()
    assert "does not work with a diffusion model; leave it out" in str(error.value)


def test_engine_options_that_work():
    EngineSettings.of_command_line(["-tp", "2", "--port", "80", "-pp=1", "--load-format=safetensors"]).check()
