"""Which models vLLM hands to us, and what their folders bring along."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoConfig, AutoTokenizer
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.config import MODELS_CONFIG_MAP

from forebay.vllm_ext import plugin
from forebay.vllm_ext.diffusion import architecture, hf
from tests.engines.diffusion_models import TINY, dream_model, llada_model

hf.register()
architecture.register()


def config(**found):
    return SimpleNamespace(model_config=SimpleNamespace(hf_config=SimpleNamespace(**found)), calls=[])


class Before:
    """A hook that was there first."""

    @staticmethod
    def verify_and_update_config(vllm_config):
        vllm_config.calls.append("before")

    @staticmethod
    def verify_and_update_model_config(model_config):
        model_config.seen = True


@pytest.mark.parametrize("found", [{}, {"is_causal": True, "mask_token_id": 1}, {"is_causal": False}])
def test_ordinary_models_go_to_the_hook_before(found):
    hook, one = architecture.shared_hook(Before), config(**found)
    hook.verify_and_update_config(one)
    hook.verify_and_update_model_config(one.model_config)
    assert one.calls == ["before"]
    assert one.model_config.seen


def test_ordinary_models_without_a_hook_before():
    hook, one = architecture.shared_hook(None), config()
    hook.verify_and_update_config(one)
    hook.verify_and_update_model_config(one.model_config)
    assert vars(one.model_config) == {"hf_config": one.model_config.hf_config}


def test_diffusion_models_do_not(monkeypatch):
    monkeypatch.setattr(
        architecture.DiffusionArchitecture, "verify_and_update_config", staticmethod(lambda one: one.calls.append("us"))
    )
    one = config(is_causal=False, mask_token_id=1)
    architecture.shared_hook(Before).verify_and_update_config(one)
    assert one.calls == ["us"]


def test_registering_twice_changes_nothing():
    hooks = {name: MODELS_CONFIG_MAP[name] for name in ("LLaDAModelLM", "DreamModel", "LlamaForCausalLM")}
    architecture.register()
    assert all(MODELS_CONFIG_MAP[name] is hook for name, hook in hooks.items())
    assert {"LLaDAModelLM", "DreamModel"} <= set(ModelRegistry.get_supported_archs())


def test_llada_folder(tmp_path):
    folder = llada_model(tmp_path)
    found = AutoConfig.from_pretrained(folder)
    assert (found.hidden_size, found.num_attention_heads, found.num_hidden_layers) == (64, 4, 4)
    assert found.max_position_embeddings == 256
    assert AutoTokenizer.from_pretrained(folder).decode([0]) == "<|endoftext|>"


def test_dream_folder(tmp_path):
    folder = dream_model(tmp_path)
    ours, same = AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(TINY)
    assert type(ours).__name__ == "DreamTokenizer"
    text = "The river was<|mask|> deep;<|im_end|>"
    assert ours.decode(ours(text)["input_ids"]) == text
    special = 5
    assert ours("The river was deep")["input_ids"] == [one - special for one in same("The river was deep")["input_ids"]]
    assert ours.mask_token_id == AutoConfig.from_pretrained(folder).mask_token_id
    assert AutoConfig.from_pretrained(folder).num_key_value_heads == 2


def test_command_lines_that_cannot_work():
    for options, says in ((["-pp", "2"], "--pipeline-parallel-size 2"), (["--enable-lora"], "--enable-lora")):
        with pytest.raises(SystemExit, match=f"forebay: {says} does not work with a diffusion model"):
            plugin.check_command_line(["vllm", "serve", str(TINY), *options])


def test_ranks_that_cannot_share_the_model():
    with pytest.raises(SystemExit, match="tensor parallel size 3 does not divide the model's 4 heads"):
        plugin.check_command_line(["vllm", "serve", str(TINY), "-tp", "3"])


def test_wrong_server_settings_end_the_command_line():
    value = '{"forebay": {"blok": 1}}'
    for option in (["--additional-config", value], [f"--additional-config={value}"]):
        with pytest.raises(SystemExit, match="blok is unknown"):
            plugin.check_command_line(["vllm", "serve", str(TINY), *option])


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"table": "absent.json"}, "absent.json"),
        ({"pool": {"path": "state", "devices": []}}, "devices"),
        ({"pool": "absent.yaml"}, "absent.yaml"),
    ],
)
def test_files_that_settings_name(settings, says):
    value = json.dumps({"forebay": settings})
    with pytest.raises(SystemExit, match=f"forebay: .*{says}"):
        plugin.check_command_line(["vllm", "serve", str(TINY), "--additional-config", value])


def test_a_folder_that_lacks_settings(tmp_path):
    shutil.copytree(TINY, tmp_path / "model")
    path = tmp_path / "model/config.json"
    path.write_text(path.read_text().replace('"rope_theta"', '"rope_thetta"'))
    with pytest.raises(SystemExit, match="has no rope_theta, which a Llama diffusion model needs"):
        plugin.check_command_line(["vllm", "serve", str(tmp_path / "model")])


def test_command_lines_that_work():
    plugin.check_command_line(["vllm", "serve", str(TINY), "-tp", "2", "--additional-config", '{"forebay": {}}'])
    plugin.check_command_line(["vllm", "serve", str(Path(TINY).parent / "tinymoe-qwen3-8m"), "--enable-lora"])
    plugin.check_command_line(["vllm", "serve", str(TINY), "--additional-config", "no json"])
