"""Real vLLM on compressed checkpoints says what it says on their dense reconstructions."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.harness import MODEL
from tests.engines.isolated import run_isolated
from tests.engines.parser_models import FAMILIES, compress, damage, tiny_model

pytestmark = pytest.mark.engine

RHO = 0.9
LAYER = "model.layers.2.mlp.experts"
INT8_FAMILY = "qwen2_moe"
"""Of which there is one with a backbone in int8 as well."""
run: Callable[..., Any] = partial(run_isolated, module="parser_scripts")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained model, all four layers compressed, and its dense reconstruction."""
    made = tmp_path_factory.mktemp("parser")
    compress(MODEL, made, [0, 1, 2, 3], RHO)
    return made


@pytest.fixture(scope="module")
def refused(folder: Path) -> dict[str, dict[str, Any]]:
    """Engines that must not start."""
    whole = folder / "compressed"

    def misplace(weights: dict[str, torch.Tensor]) -> None:
        weights[f"{LAYER}.residual.indices"][-1] = 128

    index = damage(whole, folder / "index", misplace)
    missing = damage(whole, folder / "missing", lambda weights: weights.pop(f"{LAYER}.residual.up"))
    return {
        "index": {"folder": str(index)},
        "missing": {"folder": str(missing)},
        "experts": {"folder": str(whole), "enable_expert_parallel": True},
        "adapters": {"folder": str(whole), "enable_lora": True},
    }


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Tiny models of which one layer of two is compressed: the other one's experts are vLLM's."""
    made = tmp_path_factory.mktemp("families")
    for family in FAMILIES:
        compress(tiny_model(family, made / "source" / family), made / family, [1], 0.8)
    compress(made / "source" / INT8_FAMILY, made / "int8", [1], 0.8, "int8")
    return {family: str(made / family) for family in (*FAMILIES, "int8")}


@pytest.fixture(scope="module")
def found(folder: Path, families: dict[str, str], refused: dict[str, dict[str, Any]]) -> dict[str, Any]:
    arguments = {"folder": str(folder), "original": str(MODEL), "families": families, "refused": refused}
    result: dict[str, Any] = run("one_rank", arguments)
    return result


def test_logits_are_those_of_the_dense_reconstruction(found: dict[str, Any]) -> None:
    assert found["float32"] <= 1e-5
    assert found["bfloat16"] <= 2e-2
    assert found["original"] > 0.05, "the compression must change the model, or the test sees nothing"


def test_routed_experts_take_the_promised_memory(found: dict[str, Any], folder: Path) -> None:
    config = json.loads((folder / "compressed" / "config.json").read_text())
    experts, units, size = config["num_experts"], config["moe_intermediate_size"], config["hidden_size"]
    dense = config["num_hidden_layers"] * experts * 3 * units * size * torch.float32.itemsize
    assert found["bytes"] / dense == pytest.approx(1 - RHO + 1 / experts, rel=0.02)


@pytest.mark.parametrize(
    ("case", "error"),
    [
        ("index", f"CheckpointError: {LAYER}.residual.indices has 128, outside the backbone's 0 to 127"),
        ("missing", f"CheckpointError: {LAYER}.residual.up is missing; "),
        ("experts", "EngineError: --enable-expert-parallel does not work with a compressed checkpoint"),
        ("adapters", "EngineError: --enable-lora does not work with a compressed checkpoint"),
    ],
)
def test_refuses_in_one_line(found: dict[str, Any], case: str, error: str) -> None:
    assert found["refused"][case].startswith(error)
    assert "\n" not in found["refused"][case]


@pytest.mark.parametrize("family", [*FAMILIES, "int8"])
def test_every_family_loads(found: dict[str, Any], family: str) -> None:
    assert found["families"][family] <= 1e-5


def test_two_ranks_agree_with_one(found: dict[str, Any], folder: Path) -> None:
    assert run("two_ranks", {"folder": str(folder)}) <= 1e-5
