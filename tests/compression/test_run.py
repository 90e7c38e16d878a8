"""Whole model folders: compressed, checked, restored, interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from forebay.compression.budget import estimate
from forebay.compression.errors import CompressionError, ModelError
from forebay.compression.layer import Options, compress_layer
from forebay.compression.restore import CompressedFolder
from forebay.compression.run import compress
from forebay.compression.source import ModelFolder
from tests.compression.conftest import MODEL, ROOT, settings


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_everything_else_is_untouched(compressed):
    before, after = weights(MODEL), weights(compressed)
    others = {name for name in before if ".mlp.experts." not in name}
    assert others == {name for name in after if ".mlp.experts." not in name}
    assert all(torch.equal(before[name], after[name]) for name in others)
    for path in MODEL.iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            assert (compressed / path.name).read_bytes() == path.read_bytes()
    config = json.loads((compressed / "config.json").read_text())
    assert {key: config[key] for key in config if key != "quantization_config"} == json.loads(
        (MODEL / "config.json").read_text()
    )
    assert not list(compressed.parent.glob("*.partial"))


def test_counts(compressed):
    found = CompressedFolder(compressed)
    assert found.parser.layers == [0, 1, 2, 3]
    for layer in found.parser.layers:
        assert sum(found.parser.kept[layer]) == round((1 - 0.8) * 16 * 128)
        assert min(found.parser.kept[layer]) >= 4
        assert [len(units) for units in found.read_layer(layer).kept] == found.parser.kept[layer]
    index = json.loads((compressed / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in weights(compressed).values())


def test_restored_model_is_what_was_kept(compressed, tmp_path):
    CompressedFolder(compressed).restore(tmp_path / "dense")
    dense, original = weights(tmp_path / "dense"), weights(MODEL)
    assert dense.keys() == original.keys()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32)
    assert torch.isfinite(model(torch.arange(40)[None]).logits).all()
    with pytest.raises(CompressionError, match="exists already"):
        CompressedFolder(compressed).restore(tmp_path / "dense")


def test_rho_0_reproduces_the_model(tmp_path):
    """To the rounding of bf16: backbone + residual, each of them rounded."""
    compress(MODEL, tmp_path / "all", settings(options=Options(rho=0)))
    CompressedFolder(tmp_path / "all").restore(tmp_path / "dense")
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (MODEL, tmp_path / "dense")]
    tokens = torch.arange(100, 164)[None]
    with torch.no_grad():
        before, after = (model(tokens).logits for model in models)
    assert float((before - after).norm() / before.norm()) < 2e-2


def test_a_better_sample_of_units_is_kept_than_by_chance(compressed, tmp_path):
    """The compressed model predicts text better than one whose kept units are others."""
    found = CompressedFolder(compressed)
    source = ModelFolder(MODEL)
    layer = found.read_layer(0)
    rows = [torch.randn(64, 256, generator=torch.Generator().manual_seed(1)) for _ in range(16)]
    experts = source.read_experts(0)
    chosen = compress_layer(experts, rows, Options(rho=0.8))
    wanda = compress_layer(experts, rows, Options(rho=0.8, importance="wanda"))
    assert sum(map(len, layer.kept)) == sum(map(len, chosen.kept)) == sum(map(len, wanda.kept))
    assert any(not torch.equal(one, two) for one, two in zip(chosen.kept, wanda.kept))


@pytest.mark.parametrize("family", ["qwen2moe_tiny", "deepseekv2_tiny"])
def test_fused_and_single_experts_give_the_same(tmp_path, family):
    source = ROOT / "tests/assets/parser_reference" / family
    folder = ModelFolder(source)
    layer = folder.moe_layers()[0]
    single = folder.read_experts(layer)
    fused = tmp_path / "fused"
    fused.mkdir()
    tensors = {name: folder.get(name) for name in folder.names if ".experts." not in name or ".shared" in name}
    for number in folder.moe_layers():
        experts = folder.read_experts(number)
        gate_up, down = folder.family.fused_tensors(number)
        tensors[gate_up] = torch.stack([torch.cat([one.gate_HD, one.up_HD]) for one in experts])
        tensors[down] = torch.stack([one.down_DH for one in experts])
    from safetensors.torch import save_file

    save_file(tensors, fused / "model.safetensors")
    (fused / "config.json").write_bytes((source / "config.json").read_bytes())
    again = ModelFolder(fused)
    assert again.moe_layers() == folder.moe_layers()
    for one, two in zip(single, again.read_experts(layer), strict=True):
        assert torch.equal(one.cloud(), two.cloud())


def test_dry_run_tells_the_size(compressed):
    found = estimate(MODEL, settings())
    after = sum(tensor.numel() * tensor.element_size() for tensor in weights(compressed).values())
    assert found["bytes"] == pytest.approx(after, rel=0.01)  # but for the index lists


# ---- interrupted ----


SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.compression.conftest import MODEL, settings
from forebay.compression.run import compress
def report(text, done, total):
    print(text, flush=True)
compress(MODEL, Path({out!r}), settings(), report)
"""


def test_resume_after_kill(compressed, tmp_path):
    """Killed in the middle of layer 2: the second run goes on there and the result is the same."""
    out = tmp_path / "out"
    script = SCRIPT.format(root=str(ROOT), out=str(out))
    first = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    for line in first.stdout:
        if line.startswith("layer 2: aligning"):
            os.kill(first.pid, signal.SIGKILL)
            break
    first.wait()
    assert not out.exists()
    shard = out.with_name("out.partial") / "parser-layer-00001.safetensors"
    written = shard.stat().st_mtime_ns
    steps: list[str] = []
    compress(MODEL, out, settings(), lambda text, done, total: steps.append(text))
    assert not any(step.startswith(("layer 0", "layer 1")) for step in steps)
    assert (out / shard.name).stat().st_mtime_ns == written
    ours, theirs = weights(out), weights(compressed)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_folder_of_other_settings_is_refused(tmp_path):
    out = tmp_path / "out"
    work = out.with_name("out.partial")

    def stop(text, done, total):
        if done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compress(MODEL, out, settings(), stop)
    assert work.exists()
    with pytest.raises(CompressionError, match="another model or other settings; remove it"):
        compress(MODEL, out, settings(options=Options(rho=0.5)))


def test_an_existing_folder_is_refused(tmp_path):
    with pytest.raises(CompressionError, match="exists already; give another folder"):
        compress(MODEL, tmp_path, settings())


# ---- what cannot be compressed ----


def model(tmp_path: Path, **changes) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for path in MODEL.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((MODEL / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "gpt_oss"},
            "model_type 'gpt_oss' is none that can be compressed; known are .*mixtral.*qwen3_moe",
        ),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is none of silu"),
        (
            {"num_experts": 0, "num_local_experts": 0},
            "has no routed experts; looked for model.layers.0.mlp.experts.0.gate_proj",
        ),
    ],
)
def test_models_that_are_not_known(tmp_path, changes, message):
    with pytest.raises(ModelError, match=message):
        compress(model(tmp_path, **changes), tmp_path / "out", settings())


@pytest.mark.parametrize(
    ("layers", "expected"), [("all", [0, 1, 2, 3]), ("last:2", [2, 3]), ("1,3", [1, 3]), ("1-2", [1, 2])]
)
def test_layers(tmp_path, layers, expected):
    found = estimate(MODEL, settings(layers=layers))
    assert [layer["layer"] for layer in found["layers"]] == expected


@pytest.mark.parametrize(
    ("layers", "message"), [("4", "layer 4 has no routed experts; .*: 0-3"), ("some", "is not default")]
)
def test_wrong_layers(layers, message):
    with pytest.raises(ModelError, match=message):
        estimate(MODEL, settings(layers=layers))


def test_experts_that_no_token_reaches_are_named(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the " * 200)
    few = settings(text=text, sequences=1, length=64)
    with pytest.raises(
        CompressionError, match=r"layer 0: no calibration token reached experts \d.* of 16; give more text"
    ):
        compress(MODEL, tmp_path / "out", few)
    compress(MODEL, tmp_path / "out2", settings(text=text, sequences=1, length=64, allow_unseen=True))
    CompressedFolder(tmp_path / "out2").verify()
