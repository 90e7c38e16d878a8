"""Backbones in int8: rounded row by row, and nothing that an expert keeps is lost by it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from forebay.compression.budget import Sizes, estimate
from forebay.compression.checkpoint import NAMES, SCALES, from_tensors, to_tensors
from forebay.compression.errors import CheckpointError, CompressionError
from forebay.compression.experts import Expert
from forebay.compression.importance import hidden
from forebay.compression.int8 import backbone_bytes, quantize
from forebay.compression.layer import Options, as_stored, compress_layer, find_backbone, score
from forebay.compression.restore import CompressedFolder
from forebay.compression.run import compress
from forebay.compression.source import ModelFolder
from forebay.compression.summary import report
from forebay.kernels.parser_moe.reference import expert as kernel_expert
from forebay.kernels.parser_moe.weights import ParserWeights
from tests.compression.conftest import MODEL, settings
from tests.compression.test_parts import make

INT8 = Options(rho=0.8, backbone_dtype="int8")
PREFIX = "model.layers.1.mlp.experts"
SHARD = "parser-layer-00001.safetensors"


# ---- rounding ----


@given(st.integers(0, 1000), st.floats(1e-30, 1e30))
def test_every_weight_is_within_half_a_step(seed, size):
    weights = make(seed, experts=1)[0]
    weights = Expert(weights.gate_HD * size, weights.up_HD, weights.down_DH)
    stored = quantize(weights)
    back = stored.dequantized()
    for name, scale in zip(("gate_HD", "up_HD", "down_DH"), stored.scales):
        matrix, values = getattr(weights, name), getattr(stored.weights, name)
        assert values.dtype is torch.int8
        assert values.abs().amax(1).tolist() == [127] * len(values)
        assert torch.allclose(scale, matrix.abs().amax(1) / 127)
        assert ((getattr(back, name) - matrix).abs() <= 0.501 * scale[:, None]).all()


def test_rows_of_zeros_and_of_the_smallest_numbers():
    rows = torch.tensor([[0.0, 0.0], [1e-45, -1e-45], [3.4e38, 0.0]])
    stored = quantize(Expert(rows, rows, rows))
    assert (stored.gate_scale_H > 0).all()
    assert stored.gate_scale_H.isfinite().all()
    assert torch.allclose(stored.dequantized().gate_HD, rows)


# ---- one layer ----


def test_kept_units_are_the_experts_own():
    """To the rounding of bf16; the others are the dequantized backbone's, rounded too."""
    experts = [one.to(torch.bfloat16) for one in make(3, units=40, size=24)]
    rows = [torch.randn(50, 24, generator=torch.Generator().manual_seed(e)) for e in range(5)]
    made = compress_layer(experts, rows, INT8)
    assert made.int8 is not None
    order_EH = find_backbone(experts, INT8).transport_EH
    for number, units in enumerate(made.kept):
        rest = torch.ones(40).index_fill(0, units, 0).nonzero()[:, 0]
        dense, own = made.dense(number), experts[number].permuted(order_EH[number])
        assert made.residuals[number].gate_HD.dtype is dense.gate_HD.dtype is torch.bfloat16
        for kept, one in ((units, own), (rest, made.int8.dequantized())):
            # Residuals of up to 1 are rounded by up to 2^-9, and then the sum.
            found, expected = dense.permuted(kept).cloud(), one.permuted(kept).cloud()
            torch.testing.assert_close(found, expected, rtol=2**-8, atol=2**-8)


def test_importance_is_the_change_to_the_rounded_backbone():
    experts = make(4)
    rows = [torch.randn(300, 8, generator=torch.Generator().manual_seed(e)) for e in range(5)]
    backbone = as_stored(find_backbone(experts, INT8), INT8)
    base = quantize(find_backbone(experts, INT8).weights).dequantized().to(torch.float64)
    found = score(experts, backbone, rows, INT8)
    for number, (one, inputs) in enumerate(zip(experts, rows)):
        full = one.permuted(backbone.transport_EH[number]).to(torch.float64)
        own, shared = hidden(inputs.double(), full), hidden(inputs.double(), base)
        for unit in range(12):
            change = own[:, unit, None] * full.down_DH[:, unit] - shared[:, unit, None] * base.down_DH[:, unit]
            assert float(found[number][unit]) == pytest.approx(float(change.square().sum(1).mean()), rel=1e-4)


def test_layers_survive_storing():
    rows = [torch.randn(30, 8) for _ in range(5)]
    layer = compress_layer(make(5), rows, INT8)
    stored = to_tensors("x", layer)
    assert list(stored) == [f"x.{name}" for name in NAMES + SCALES]
    again = from_tensors("x", stored.__getitem__)
    for expert in range(5):
        assert torch.equal(layer.dense(expert).cloud(), again.dense(expert).cloud())


# ---- a folder ----


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("int8") / "out"
    compress(MODEL, out, settings(options=INT8))
    return out


def test_a_whole_model(folder, compressed):
    found = CompressedFolder(folder)
    found.verify()
    assert found.parser.kept.keys() == CompressedFolder(compressed).parser.kept.keys()
    assert json.loads((folder / "config.json").read_text())["quantization_config"]["backbone_dtype"] == "int8"
    told = report(found)
    size = sum(tensor.nbytes for path in folder.glob("*.safetensors") for tensor in load_file(path).values())
    assert told["bytes"] == size == estimate(MODEL, settings(options=INT8))["bytes"]
    assert told["backbone_dtype"] == "int8"
    plain = report(CompressedFolder(compressed))
    assert told["dense_bytes"] == plain["dense_bytes"]
    assert plain["bytes"] - size == 4 * (3 * 128 * 256 * 2 - backbone_bytes(128, 256))


def test_folders_of_other_types_stay_readable_by_older_releases(compressed):
    """They refuse fields that they do not know."""
    assert "backbone_dtype" not in json.loads((compressed / "config.json").read_text())["quantization_config"]


def test_restored_experts_are_those_the_kernels_compute(folder, tmp_path):
    CompressedFolder(folder).restore(tmp_path / "dense")
    dense, stored = ModelFolder(tmp_path / "dense"), load_file(folder / SHARD)
    weights = ParserWeights(*(stored[f"{PREFIX}.{name}"] for name in NAMES + SCALES))
    for number, expert in enumerate(dense.read_experts(1)):
        assert expert.gate_HD.dtype is torch.bfloat16
        expected = Expert(*kernel_expert(weights, number, torch.float32))
        assert torch.equal(expert.cloud(), expected.to(torch.bfloat16).cloud())


def test_a_budget_is_met_to_the_unit(tmp_path):
    sizes = Sizes.of(ModelFolder(MODEL), [0, 1, 2, 3], INT8)
    config = compress(MODEL, tmp_path / "out", settings(options=INT8, memory_budget=sizes.total(1700)))
    assert sum(map(sum, config.kept.values())) == 1700
    assert report(CompressedFolder(tmp_path / "out"))["bytes"] == sizes.total(1700)


def test_an_unfinished_folder_of_the_other_type_is_refused(tmp_path):
    def stop(text, done, total):
        if done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compress(MODEL, tmp_path / "out", settings(), stop)
    with pytest.raises(CompressionError, match="other settings"):
        compress(MODEL, tmp_path / "out", settings(options=INT8))


# ---- damage ----


def set_value(name, value):
    return lambda tensors: tensors[f"{PREFIX}.{name}"].__setitem__(3, value)


def replace(name, change):
    return lambda tensors: tensors.__setitem__(f"{PREFIX}.{name}", change(tensors[f"{PREFIX}.{name}"]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(f"{PREFIX}.{SCALES[1]}"), "backbone.up_proj.weight_scale is missing"),
        (
            set_value(SCALES[0], 0.0),
            "backbone.gate_proj.weight_scale is torch.float32; it must be finite float32 above 0",
        ),
        (set_value(SCALES[2], float("nan")), "backbone.down_proj.weight_scale .* must be finite"),
        (set_value(SCALES[2], float("inf")), "backbone.down_proj.weight_scale .* must be finite"),
        (
            replace(SCALES[0], torch.Tensor.bfloat16),
            "backbone.gate_proj.weight_scale is torch.bfloat16; it must be .* float32",
        ),
        (
            replace(SCALES[2], lambda scale: scale[:-1].clone()),
            r"backbone.down_proj.weight_scale has shape \(255,\), not \(256,\)",
        ),
        (replace(NAMES[0], torch.Tensor.bfloat16), "backbone.gate_proj.weight is torch.bfloat16, not the int8 of"),
        (set_value("residual.up", float("nan")), "residual.up has values that are no finite"),
    ],
)
def test_wrong_tensors_are_named(folder, tmp_path, change, message):
    import shutil

    damaged = Path(shutil.copytree(folder, tmp_path / "damaged"))
    tensors = load_file(damaged / SHARD)
    before = set(tensors)
    change(tensors)
    save_file(tensors, damaged / SHARD, metadata={"format": "pt"})
    index = json.loads((damaged / "model.safetensors.index.json").read_text())
    for name in before - set(tensors):
        del index["weight_map"][name]
    (damaged / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=f"{PREFIX}.{message}"):
        CompressedFolder(damaged).verify()


def test_a_type_that_is_not_known(folder, tmp_path):
    import shutil

    damaged = Path(shutil.copytree(folder, tmp_path / "damaged"))
    config = json.loads((damaged / "config.json").read_text())
    config["quantization_config"]["backbone_dtype"] = "fp8"
    (damaged / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"quantization_config.backbone_dtype: Input should be 'int8'"):
        CompressedFolder(damaged)
