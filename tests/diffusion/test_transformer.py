"""The forward pass over ragged rows, against a plain one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from forebay.diffusion.errors import ModelError
from forebay.diffusion.families.base import LLAMA_PARTS
from forebay.diffusion.families.llada import LLADA
from forebay.diffusion.prefix import PrefixedRequest, PrefixStates
from forebay.diffusion.transformer import Rows, Transformer
from forebay.diffusion.weights import load, read_config
from tests.diffusion.naive import Naive

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "tests/assets/tinydlm-prefix"
LAYERS = 6


@pytest.fixture(scope="module")
def transformer() -> Transformer:
    return Transformer(load(MODEL))


@pytest.fixture(scope="module")
def naive() -> Naive:
    return Naive(MODEL)


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(5, 4096, (count,), generator=torch.Generator().manual_seed(seed))


def rows(ids: torch.Tensor) -> Rows:
    return Rows(ids, torch.arange(len(ids)))


def logits(transformer: Transformer, one: Rows) -> torch.Tensor:
    return transformer.logits(transformer.run([one])[0].hidden_ND)


@pytest.mark.parametrize("count", [1, 2, 33, 200])
def test_equals_the_plain_forward_pass(transformer: Transformer, naive: Naive, count: int) -> None:
    found, expected = logits(transformer, rows(tokens(count))), naive.logits(tokens(count))
    assert float((found - expected).abs().max()) < 1e-4


def test_a_request_does_not_see_the_others(transformer: Transformer) -> None:
    batch = [rows(tokens(count, count)) for count in (7, 1, 50, 12)]
    together = transformer.run(batch)
    for one, found in zip(batch, together, strict=True):
        torch.testing.assert_close(found.hidden_ND, transformer.run([one])[0].hidden_ND, rtol=1e-4, atol=1e-4)


def test_keys_may_come_from_before(transformer: Transformer) -> None:
    """Half of the rows against what a full pass left of the other half."""
    ids = tokens(40)
    (full,) = transformer.run([rows(ids)])
    known = [type(pair)(pair.keys[:25], pair.values[:25]) for pair in full.own]
    (half,) = transformer.run([Rows(ids[25:], torch.arange(25, 40), known=known)])
    torch.testing.assert_close(half.hidden_ND, full.hidden_ND[25:], rtol=1e-4, atol=1e-4)


# ---- behind a prefix ----


@pytest.mark.parametrize("prefix", [1, 2, 60])
def test_without_reuse_a_prefix_changes_nothing(transformer: Transformer, naive: Naive, prefix: int) -> None:
    ids = tokens(prefix + 20)
    request = PrefixedRequest(transformer, PrefixStates.compute(transformer, ids[:prefix], [1]), 0)
    expected = naive.logits(ids)[prefix:]
    (refreshed,) = transformer.run([request.refresh(ids[prefix:])])
    assert float((transformer.logits(refreshed.hidden_ND) - expected).abs().max()) < 1e-4
    request.keep(refreshed)
    (again,) = transformer.run([request.step(ids[prefix:])])
    assert float((transformer.logits(again.hidden_ND) - expected).abs().max()) < 1e-4


@pytest.mark.parametrize("depth", range(1, LAYERS + 1))
def test_reuse_by_its_definition(transformer: Transformer, depth: int) -> None:
    """Layer by layer with plain passes: the prefix alone below b, everything together above."""
    ids, prefix = tokens(50, 3), 30
    request = PrefixedRequest(transformer, PrefixStates.compute(transformer, ids[:prefix], [depth]), depth)
    (found,) = transformer.run([request.refresh(ids[prefix:])])
    alone = PrefixStates.compute(transformer, ids[:prefix], range(1, LAYERS + 1))
    own = transformer.embed(ids[prefix:])
    shallow, deep = transformer.weights.layers[:depth], transformer.weights.layers[depth:]
    from forebay.diffusion.transformer import Computed

    for number, layer in enumerate(shallow):
        part = Rows(ids[prefix:], torch.arange(prefix, 50), known=alone.known)
        own = transformer._layer(layer, number, own, [20], [part], [Computed(own)])
    if deep:
        everything = torch.cat([alone.states[depth], own])
        for number, layer in enumerate(deep, depth):
            everything = transformer._layer(layer, number, everything, [50], [rows(ids)], [Computed(own)])
        own = everything[prefix:]
    torch.testing.assert_close(found.hidden_ND, own, rtol=1e-4, atol=1e-4)
    assert len(found.prefix) == LAYERS
    assert all(len(pair.keys) == prefix for pair in found.prefix)


def test_requests_of_all_depths_in_one_pass(transformer: Transformer) -> None:
    ids = tokens(80, 9)
    batch, alone = [], []
    for depth in range(LAYERS + 1):
        prefix = 10 + 5 * depth
        states = PrefixStates.compute(transformer, ids[:prefix], [max(depth, 1)])
        one = PrefixedRequest(transformer, states, depth).refresh(ids[prefix : prefix + 3 + depth])
        batch.append(one)
        alone.append(transformer.run([one])[0])
    for mine, other in zip(transformer.run(batch), alone, strict=True):
        torch.testing.assert_close(mine.hidden_ND, other.hidden_ND, rtol=1e-4, atol=1e-4)
        for one, two in zip(mine.prefix, other.prefix, strict=True):
            torch.testing.assert_close(one.keys, two.keys, rtol=1e-4, atol=1e-4)


def test_the_first_layer_of_a_prefix_is_the_same_in_every_request(transformer: Transformer) -> None:
    ids = tokens(40)
    states = PrefixStates.compute(transformer, ids[:25], [2])
    (full,) = transformer.run([rows(ids)])
    torch.testing.assert_close(states.known[0].keys, full.own[0].keys[:25], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(states.known[1].values, full.own[1].values[:25], rtol=1e-2, atol=1e-2)


def test_states_take_what_they_hold(transformer: Transformer) -> None:
    states = PrefixStates.compute(transformer, tokens(25), [1, 3])
    assert len(states.known) == 3
    assert states.states.keys() == {1, 3}
    assert states.bytes == 25 * 192 * 4 * (3 * 2 + 2)


# ---- folders ----


def test_the_same_model_under_other_names(tmp_path: Path, transformer: Transformer) -> None:
    """Stored as LLaDA stores it."""
    stored = load_file(MODEL / "model.safetensors")
    names = {f"{LLAMA_PARTS[part]}.weight": f"{name}.weight" for part, name in LLADA.parts.items()}
    renamed = {}
    for name, tensor in stored.items():
        if name.startswith("model.layers."):
            _, _, number, rest = name.split(".", 3)
            renamed[f"{LLADA.layer.format(layer=number)}.{names[rest]}"] = tensor
    renamed[f"{LLADA.embedding}.weight"] = stored["model.embed_tokens.weight"]
    renamed[f"{LLADA.norm}.weight"] = stored["model.norm.weight"]
    save_file(renamed, tmp_path / "model.safetensors")
    config = {
        "architectures": ["LLaDAModelLM"], "d_model": 192, "n_heads": 4, "n_layers": 6, "mlp_hidden_size": 512,
        "vocab_size": 4096, "embedding_size": 4096, "max_sequence_length": 1024, "rope_theta": 1e5,
        "rms_norm_eps": 1e-6, "mask_token_id": 1, "eos_token_id": 0, "weight_tying": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    other = Transformer(load(tmp_path))
    assert torch.equal(logits(other, rows(tokens(30))), logits(transformer, rows(tokens(30))))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel' is no diffusion model .* LLaDAModelLM, DreamModel"),
        ({"is_causal": True}, "config.json has no is_causal: false, which a Llama diffusion model needs"),
        ({"mask_token_id": None}, "config.json has no mask_token_id"),
    ],
)
def test_folders_that_hold_no_diffusion_model(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    config = json.loads((MODEL / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    with pytest.raises(ModelError, match=message):
        read_config(tmp_path)


def test_a_tensor_that_is_missing(tmp_path: Path) -> None:
    stored = load_file(MODEL / "model.safetensors")
    del stored["model.layers.3.mlp.up_proj.weight"]
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((MODEL / "config.json").read_bytes())
    with pytest.raises(ModelError, match=r"model.layers.3.mlp.up_proj.weight cannot be read .*; copy it again"):
        load(tmp_path)
    with pytest.raises(ModelError, match=r"config\.json: No such file"):
        load(tmp_path / "absent")
