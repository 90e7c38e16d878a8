"""What makes two models different, whatever they are called."""

import dataclasses
import json
import logging
import struct

import pytest

from forebay.storage import namespace as namespaces
from forebay.storage.namespace import Namespace, weights_fingerprint

BASE = Namespace(model="m", weights="w", dtype="bf16", layout="NHD", tokens_per_block=16, groups=("0:full",))

CHANGES = {
    "weights": "v",
    "dtype": "fp8",
    "layout": "HND",
    "tokens_per_block": 32,
    "blocks_per_chunk": 2,
    "tp": 2,
    "pp": 2,
    "pcp": 2,
    "dcp": 2,
    "groups": ("0:full", "1:window"),
    "format": 99,
    "extra": {"a": "b"},
}


def test_every_field_counts_but_the_name():
    assert {"model", *CHANGES} == {field.name for field in dataclasses.fields(Namespace)}
    prints = {dataclasses.replace(BASE, **{name: value}).fingerprint for name, value in CHANGES.items()}
    assert len(prints | {BASE.fingerprint}) == len(CHANGES) + 1
    assert dataclasses.replace(BASE, model="n").fingerprint == BASE.fingerprint


def test_equal_namespaces_are_equal_in_every_process():
    assert BASE.fingerprint == dataclasses.replace(BASE).fingerprint
    assert Namespace(model="m", weights="w").fingerprint.hex() == "febcd52c3bd92c1b846fb81dd9d1d57c"
    one = dataclasses.replace(BASE, extra={"a": "1", "b": "2"})
    assert one.describe() == dataclasses.replace(BASE, extra={"b": "2", "a": "1"}).describe()
    assert json.loads(one.describe())["extra"] == {"a": "1", "b": "2"}


def safetensors(path, tensors):
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensors.values()))


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"layers": 2}')
    safetensors(folder / "model.safetensors", {f"t{i}": bytes([i]) * 10_000 for i in range(20)})
    return folder


def test_the_same_content_is_the_same_anywhere(model, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in model.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert weights_fingerprint(model) == weights_fingerprint(copy)
    assert weights_fingerprint(str(model)) == weights_fingerprint(model)


@pytest.mark.parametrize("tensor", range(20))
def test_other_weights_under_the_same_name(model, tensor):
    before = weights_fingerprint(model)
    tensors = {f"t{i}": bytes([i + (i == tensor)]) * 10_000 for i in range(20)}
    safetensors(model / "model.safetensors", tensors)
    assert weights_fingerprint(model) != before


def test_other_settings(model):
    before = weights_fingerprint(model)
    (model / "config.json").write_text('{"layers": 3}')
    changed = weights_fingerprint(model)
    (model / "adapter_config.json").write_text('{"r": 8}')
    (model / "README.md").write_text("no weights")
    (model / "tokenizer.json").write_text("{}")
    assert len({before, changed, weights_fingerprint(model)}) == 3


def test_more_shards_than_before(model):
    before = weights_fingerprint(model)
    safetensors(model / "model-2.safetensors", {"t": b"x" * 100})
    assert weights_fingerprint(model) != before


@pytest.mark.parametrize("name", ["model.gguf", "pytorch_model.bin", "odd.safetensors"])
def test_files_of_other_formats(tmp_path, name):
    file = tmp_path / name
    file.write_bytes(bytes(5_000_000))
    before = weights_fingerprint(file)
    file.write_bytes(b"\1" + bytes(4_999_999))
    first = weights_fingerprint(file)
    file.write_bytes(bytes(4_999_999) + b"\1")
    last = weights_fingerprint(file)
    file.write_bytes(bytes(2_500_000) + b"\1" * 10_000 + bytes(2_490_000))
    middle = weights_fingerprint(file)
    assert len({before, first, last, middle}) == 4
    file.write_bytes(b"")
    assert weights_fingerprint(file) not in {before, first, last, middle}


def test_a_big_model_is_sampled(model):
    tensors = {f"t{i}": bytes([i % 250]) * 10_000 for i in range(2000)}
    safetensors(model / "model.safetensors", tensors)
    start = namespaces._header_size
    with open(model / "model.safetensors", "rb") as file:
        size = (model / "model.safetensors").stat().st_size
        places = namespaces._places(file.fileno(), size, 64)
        header = start(file.fileno(), size)
    assert 50 <= len([place for place in places if place >= header]) <= 66


def test_a_snapshot_of_the_hub_is_its_commit(tmp_path, monkeypatch):
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = tmp_path / "models--org--name" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (tmp_path / "models--org--name" / "refs").mkdir()
    (tmp_path / "models--org--name" / "refs" / "main").write_text(commit)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert weights_fingerprint(snapshot) == f"commit:{commit}"
    assert weights_fingerprint("org/name") == f"commit:{commit}"
    assert weights_fingerprint("org/name", "f" * 40) == "commit:" + "f" * 40


def test_an_unknown_name_stands_for_itself_with_a_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert weights_fingerprint("org/none") == "name:org/none@main"
    assert "clear the pool when they change" in caplog.text
    assert weights_fingerprint("org/none", "v2") == "name:org/none@v2"


def test_asking_again_is_free_until_a_file_changes(model):
    weights_fingerprint(model)
    before = namespaces._fingerprint_content.cache_info()
    weights_fingerprint(model)
    assert namespaces._fingerprint_content.cache_info().hits == before.hits + 1
