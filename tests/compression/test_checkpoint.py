"""Damage of every kind is found and named."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from forebay.compression.checkpoint import from_tensors, to_tensors
from forebay.compression.errors import CheckpointError, CompressionError
from forebay.compression.restore import CompressedFolder

SHARD = "parser-layer-00001.safetensors"
PREFIX = "model.layers.1.mlp.experts"


def edit(folder, change):
    tensors = load_file(folder / SHARD)
    change(tensors)
    save_file(tensors, folder / SHARD, metadata={"format": "pt"})


def edit_json(folder, name, change):
    found = json.loads((folder / name).read_text())
    change(found)
    (folder / name).write_text(json.dumps(found))


def refused(folder, message):
    with pytest.raises(CheckpointError, match=message):
        CompressedFolder(folder).verify()


def test_a_sound_one_passes(compressed):
    CompressedFolder(compressed).verify()


def test_layers_survive_storing(compressed):
    layer = CompressedFolder(compressed).read_layer(1)
    again = from_tensors("x", to_tensors("x", layer).__getitem__)
    for expert in range(16):
        assert torch.equal(layer.dense(expert).cloud(), again.dense(expert).cloud())


def set_value(name, place, value):
    return lambda tensors: tensors[f"{PREFIX}.{name}"].view(-1).__setitem__(place, value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_value("residual.indices", 0, 128), "residual.indices has 128, outside the backbone's 0 to 127"),
        (set_value("residual.indices", 0, -1), "residual.indices has -1, outside"),
        (set_value("residual.offsets", 3, 1), "residual.offsets does not agree with the counts"),
        (
            set_value("backbone.up_proj.weight", 7, float("nan")),
            "backbone.up_proj.weight has values that are no finite",
        ),
        (set_value("residual.down", 7, float("inf")), "residual.down has values that are no finite"),
    ],
)
def test_wrong_values(damaged, change, message):
    edit(damaged, change)
    refused(damaged, f"{PREFIX}.{message}")


def test_a_unit_twice(damaged):
    edit(
        damaged,
        lambda tensors: tensors[f"{PREFIX}.residual.indices"].__setitem__(1, tensors[f"{PREFIX}.residual.indices"][0]),
    )
    refused(damaged, r"residual.indices: unit \d+ is twice in expert 0")


def test_units_out_of_order(damaged):
    def swap(tensors):
        indices = tensors[f"{PREFIX}.residual.indices"]
        first = int(tensors[f"{PREFIX}.residual.offsets"][1])
        indices[first], indices[first + 1] = indices[first + 1].clone(), indices[first].clone()

    edit(damaged, swap)
    refused(damaged, r"residual.indices: unit \d+ is out of order in expert 1")


@pytest.mark.parametrize("name", ["backbone.gate_proj.weight", "residual.gate", "residual.down"])
def test_wrong_shapes(damaged, name):
    edit(damaged, lambda tensors: tensors.__setitem__(f"{PREFIX}.{name}", tensors[f"{PREFIX}.{name}"][:-1].clone()))
    refused(damaged, rf"{PREFIX}.{name} has shape \(\d+, 256\), not \(\d+, 256\)")


def test_wrong_type(damaged):
    name = f"{PREFIX}.residual.indices"
    edit(damaged, lambda tensors: tensors.__setitem__(name, tensors[name].long()))
    refused(damaged, "residual.indices is torch.int64, not int32")


def test_a_missing_tensor(damaged):
    edit_json(damaged, "model.safetensors.index.json", lambda found: found["weight_map"].pop(f"{PREFIX}.residual.up"))
    refused(damaged, f"{PREFIX}.residual.up is missing")


def test_a_truncated_shard(damaged):
    data = (damaged / SHARD).read_bytes()
    (damaged / SHARD).write_bytes(data[: len(data) // 2])
    refused(damaged, f"{re.escape(SHARD)} cannot be read .*; copy it again")


def test_a_missing_shard(damaged):
    (damaged / SHARD).unlink()
    with pytest.raises(CompressionError, match=f"{re.escape(SHARD)} is missing, though .* names it"):
        CompressedFolder(damaged)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(format_version=2), "format_version 2 is not the 1 that this forebay reads"),
        (lambda c: c.update(quant_method="awq"), "quant_method is 'awq', not 'parser'"),
        (lambda c: c.pop("hidden_units"), "quantization_config.hidden_units: Field required"),
        (lambda c: c.update(rho=2), "quantization_config.rho: .* less than or equal to 1"),
        (lambda c: c.update(extra=1), "quantization_config.extra"),
        (lambda c: c["kept"]["1"].pop(), "kept.1 has 15 experts, not 16"),
        (lambda c: c["kept"]["1"].__setitem__(0, 99), "has shape"),
        (lambda c: c["kept"].pop("1"), "is there, but quantization_config.kept does not name its layer"),
    ],
)
def test_wrong_configuration(damaged, change, message):
    edit_json(damaged, "config.json", lambda found: change(found["quantization_config"]))
    refused(damaged, message)
