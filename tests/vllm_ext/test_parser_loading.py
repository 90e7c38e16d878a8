"""Names on their way through vLLM's loaders, and the collecting of a layer's tensors."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from forebay.compression.checkpoint import NAMES, SCALES, ParserConfig
from forebay.compression.errors import CheckpointError
from forebay.vllm_ext.parser.config import ParserQuantConfig
from forebay.vllm_ext.parser.loading import RENAMED, LayerLoader, parameter_dtype, parameters
from forebay.vllm_ext.plugin import check_command_line

PREFIX = "model.layers.3.mlp.experts"
KEPT = [2, 0, 1]
CONFIG = ParserConfig(rho=0.75, activation="silu", experts=3, hidden_units=4, hidden_size=6, kept={3: KEPT})
INT8 = CONFIG.model_copy(update={"backbone_dtype": "int8"})


def tensors() -> dict[str, torch.Tensor]:
    shapes = [(4, 6), (4, 6), (6, 4), (3, 6), (3, 6), (3, 6)]
    values = [torch.full(shape, float(number)) for number, shape in enumerate(shapes)]
    values += [torch.tensor([1, 3, 0]).int(), torch.tensor([0, 2, 2, 3]).int()]
    return dict(zip(NAMES, values))


def int8_tensors() -> dict[str, torch.Tensor]:
    found = tensors()
    for name, scale in zip(NAMES, SCALES):
        found |= {name: found[name].to(torch.int8), scale: torch.full(found[name].shape[:1], 0.5)}
    return found


@pytest.mark.parametrize("parts", [("gate_proj", "down_proj", "up_proj"), ("w1", "w2", "w3")])
@pytest.mark.parametrize("name", NAMES + SCALES)
def test_names_arrive_at_their_parameter(name: str, parts: tuple[str, str, str]) -> None:
    """As in vLLM's loaders: renamed once, then matched with the weights of expert 0."""
    mapper = ParserQuantConfig.get_checkpoint_weight_mapper()
    found = mapper.map_name(f"{PREFIX}.{name}")
    assert mapper.map_name(found) == found
    for ours, theirs in zip(("gate_proj", "down_proj", "up_proj"), parts):
        found = found.replace(f".{ours}.", f".{theirs}.")
    mapping = RoutedExperts.build_expert_params_mapping(*parts, num_experts=16)
    (entry,) = [entry for entry in mapping if entry[1] in found]
    parameter = found.replace(entry[1], entry[0]).removeprefix("model.layers.3.mlp.experts.routed_experts.")
    assert parameters(INT8)[parameter] == name
    assert parameters(CONFIG).get(parameter) == (None if name in SCALES else name)


def test_other_names_stay() -> None:
    mapper = ParserQuantConfig.get_checkpoint_weight_mapper()
    for name in (f"{PREFIX}.0.gate_proj.weight", "model.layers.3.mlp.gate.weight", "model.residual.gate"):
        assert mapper.map_name(name) == name
    assert len(RENAMED) == len(set(RENAMED.values())) == len(parameters(INT8)) == 11


@pytest.mark.parametrize("seed", range(4))
def test_any_order_will_do(seed: int) -> None:
    loader, given = LayerLoader(PREFIX, 3, CONFIG), tensors()
    names = random.Random(seed).sample(NAMES, len(NAMES))
    assert [loader.add(name, given[name]) for name in names] == [False] * 7 + [True]
    weights = loader.finish(0, 1)
    assert weights.residual_down_RD is given["residual.down"]
    assert not loader.found


@pytest.mark.parametrize("seed", range(4))
def test_scales_of_an_int8_backbone_belong_to_the_layer(seed: int) -> None:
    loader, given = LayerLoader(PREFIX, 3, INT8), int8_tensors()
    names = random.Random(seed).sample(INT8.names, 11)
    assert [loader.add(name, given[name]) for name in names] == [False] * 10 + [True]
    weights = loader.finish(0, 1)
    assert [scale is given[name] for scale, name in zip(weights.scales, SCALES)] == [True] * 3
    dtypes = [parameter_dtype(name, INT8, torch.bfloat16) for name in INT8.names]
    assert dtypes == [torch.int8] * 3 + [torch.bfloat16] * 3 + [torch.int32] * 2 + [torch.float32] * 3
    assert parameter_dtype(NAMES[0], CONFIG, torch.bfloat16) is torch.bfloat16


@pytest.mark.parametrize("name", SCALES)
def test_a_missing_scale_is_named(name: str) -> None:
    loader = LayerLoader(PREFIX, 3, INT8)
    for other, tensor in int8_tensors().items():
        if other != name:
            loader.add(other, tensor)
    with pytest.raises(CheckpointError, match=rf"^{PREFIX}.{name} is missing; "):
        loader.finish(0, 1)


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_tensor_is_named(name: str) -> None:
    loader = LayerLoader(PREFIX, 3, CONFIG)
    for other, tensor in tensors().items():
        if other != name:
            loader.add(other, tensor)
    with pytest.raises(CheckpointError, match=rf"^{PREFIX}.{name} is missing; "):
        loader.finish(0, 1)


def test_a_tensor_that_comes_twice_is_named() -> None:
    loader = LayerLoader(PREFIX, 3, CONFIG)
    loader.add(NAMES[0], torch.zeros(4, 6))
    with pytest.raises(CheckpointError, match=rf"^{PREFIX}.{NAMES[0]} is in two files"):
        loader.add(NAMES[0], torch.zeros(4, 6))


WRONG: dict[str, Any] = {
    "residual.indices": (torch.tensor([1, 4, 0]).int(), "has 4, outside the backbone's 0 to 3"),
    "residual.offsets": (torch.tensor([0, 1, 2, 3]).int(), "does not agree with the counts"),
    "residual.up": (torch.zeros(2, 6), r"has shape \(2, 6\), not \(3, 6\)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_tensor_is_named(name: str) -> None:
    tensor, message = WRONG[name]
    loader = LayerLoader(PREFIX, 3, CONFIG)
    for other, right in tensors().items():
        loader.add(other, tensor if other == name else right)
    with pytest.raises(CheckpointError, match=f"^{PREFIX}.{name} {message}"):
        loader.finish(0, 1)


def test_configuration_of_another_version_is_refused() -> None:
    with pytest.raises(CheckpointError, match="format_version 2"):
        ParserQuantConfig.from_config({**CONFIG.model_dump(), "format_version": 2})


def test_no_folder_no_check(tmp_path: Path) -> None:
    """A name on a hub is vLLM's to fetch."""
    ParserQuantConfig(CONFIG).maybe_update_config("some/model")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = {"model_type": "qwen3_moe", "quantization_config": CONFIG.model_dump(mode="json")}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({f"{PREFIX}.{name}": tensor for name, tensor in tensors().items()}, tmp_path / "model.safetensors")
    return tmp_path


def test_serve_starts_with_a_sound_folder(folder: Path) -> None:
    check_command_line(["vllm", "serve", str(folder), "--port", "1"])
    ParserQuantConfig(CONFIG).maybe_update_config(str(folder))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--enable-expert-parallel"], "--enable-expert-parallel does not work with a compressed checkpoint"),
        (["-ep"], "--enable-expert-parallel does not work"),
        (["--enable_lora"], "--enable-lora does not work with a compressed checkpoint: adapters of experts"),
        (["-dp", "2"], "--data-parallel-size 2 does not work"),
        (["--load-format=dummy"], "--load-format dummy does not work"),
        (["--tensor-parallel-size", "7"], "tensor parallel size 7 does not divide the"),
    ],
)
def test_serve_refuses_options_in_one_line(folder: Path, options: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=rf"^forebay: {message}") as ended:
        check_command_line(["vllm", "serve", str(folder), "--port", "1", *options])
    assert "\n" not in str(ended.value)


def test_serve_leaves_other_options_to_vllm(folder: Path) -> None:
    check_command_line(["vllm", "serve", str(folder), "-tp", "two", "--data-parallel-size", "--load-format"])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("residual.up", None, f"{PREFIX}.residual.up is missing"),
        ("residual.indices", torch.tensor([3, 1, 0]).int(), f"{PREFIX}.residual.indices: unit 1 is out of order"),
    ],
)
def test_serve_ends_in_one_line(folder: Path, name: str, value: torch.Tensor | None, message: str) -> None:
    stored = load_file(folder / "model.safetensors")
    if value is None:
        del stored[f"{PREFIX}.{name}"]
    else:
        stored[f"{PREFIX}.{name}"] = value
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(SystemExit, match=rf"^forebay: {message}") as ended:
        check_command_line(["vllm", "serve", str(folder)])
    assert "\n" not in str(ended.value)
