"""The forward pass over ragged rows, against a plain one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from forebay.diffusion.attention import KeyValues
from forebay.diffusion.errors import ModelError
from forebay.diffusion.families.base import LLAMA_PARTS
from forebay.diffusion.families.llada import LLADA
from forebay.diffusion.prefix import PrefixStates
from forebay.diffusion.transformer import Kept, Rows, Transformer
from forebay.diffusion.weights import load, pair_up, read_config, take_apart
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


def rows(ids: torch.Tensor, **changes) -> Rows:
    return Rows(tokens_N=ids, positions_N=torch.arange(len(ids)), **changes)


def logits(transformer: Transformer, one: Rows) -> torch.Tensor:
    return transformer.logits(transformer.run([one])[0].hidden_ND)


def alone(transformer: Transformer, ids: torch.Tensor, *depths: int) -> PrefixStates:
    states = PrefixStates(ids)
    for depth in depths:
        states.deepen(transformer, depth)
    return states


def behind(transformer: Transformer, states: PrefixStates, depth: int, ids: torch.Tensor, **changes) -> Rows:
    """Rows of a request that starts with a prefix."""
    first = len(states.tokens_P)
    positions = torch.arange(first, first + len(ids))
    return Rows(tokens_N=ids, positions_N=positions, prefix=states.join(transformer, depth), **changes)


def close(mine: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("count", [1, 2, 33, 200])
def test_equals_the_plain_forward_pass(transformer: Transformer, naive: Naive, count: int) -> None:
    """Which computes in float64: 200 random tokens are off by 1e-4 in float32, whoever computes attention."""
    found, expected = logits(transformer, rows(tokens(count))), naive.logits(tokens(count))
    assert float((found - expected).abs().max()) < 3e-4


def test_a_request_does_not_see_the_others(transformer: Transformer) -> None:
    batch = [rows(tokens(count, count)) for count in (7, 1, 50, 12)]
    for one, found in zip(batch, transformer.run(batch), strict=True):
        close(found.hidden_ND, transformer.run([one])[0].hidden_ND)


@pytest.mark.parametrize("last", [None, 0, 3])
def test_only_what_is_wanted_is_computed_in_the_last_layer(transformer: Transformer, last: int | None) -> None:
    ids, wanted = tokens(40), torch.tensor([3, 39, 7])
    batch = [rows(ids, last=last), rows(ids, last=last, wanted=wanted), rows(ids, last=last, wanted=wanted[:0])]
    everything, some, none = transformer.run([*batch, rows(tokens(9))])[:3]
    close(some.hidden_ND, everything.hidden_ND[wanted])
    assert none.hidden_ND.shape == (0, 192)


def test_keys_may_come_from_before(transformer: Transformer) -> None:
    """Half of the rows against what a full pass left of the other half."""
    ids = tokens(40)
    (full,) = transformer.run([rows(ids, keep=True)])
    known = [KeyValues(pair.keys[:25], pair.values[:25]) for pair in full.own]
    (half,) = transformer.run([Rows(tokens_N=ids[25:], positions_N=torch.arange(25, 40), prefix=known)])
    close(half.hidden_ND, full.hidden_ND[25:])


def test_some_rows_are_renewed_among_those_that_were_kept(transformer: Transformer) -> None:
    """What is renewed is the keys and values of these rows; the others stay as they were."""
    ids, others = tokens(40), tokens(10, 4)
    (full,) = transformer.run([rows(ids, keep=True)])
    outside = [KeyValues(*(torch.cat([one[:20], one[30:]]) for one in pair)) for pair in full.own]
    middle = Rows(tokens_N=others, positions_N=torch.arange(20, 30), prefix=outside)
    (expected,) = transformer.run([middle])
    kept = [KeyValues(pair.keys.clone(), pair.values.clone()) for pair in full.own]
    again = Rows(tokens_N=others, positions_N=torch.arange(20, 30), kept=Kept(kept, 20), keep=True)
    (found,) = transformer.run([again])
    close(found.hidden_ND, expected.hidden_ND)
    for before, after, new in zip(full.own, kept, found.own, strict=True):
        assert torch.equal(after.keys[20:30], new.keys)
        assert torch.equal(after.keys[:20], before.keys[:20])
        assert torch.equal(after.values[30:], before.values[30:])


# ---- behind a prefix ----


@pytest.mark.parametrize("prefix", [1, 2, 60])
def test_without_reuse_a_prefix_changes_nothing(transformer: Transformer, naive: Naive, prefix: int) -> None:
    ids = tokens(prefix + 20)
    states = PrefixStates(ids[:prefix])
    expected = naive.logits(ids)[prefix:]
    (refreshed,) = transformer.run([behind(transformer, states, 0, ids[prefix:])])
    assert float((transformer.logits(refreshed.hidden_ND) - expected).abs().max()) < 1e-4
    positions = torch.arange(prefix, prefix + 20)
    step = Rows(tokens_N=ids[prefix:], positions_N=positions, prefix=refreshed.prefix)
    assert float((logits(transformer, step) - expected).abs().max()) < 1e-4


@pytest.mark.parametrize("depth", range(1, LAYERS + 1))
def test_reuse_by_its_definition(depth: int) -> None:
    """Layer by layer as the method is described, in float64: the prefix alone below b, all together from b on."""
    ids, prefix = tokens(50, 3), 30
    naive, transformer = Naive(MODEL), Transformer(load(MODEL))
    states = alone(transformer, ids[:prefix], depth)
    (found,) = transformer.run([behind(transformer, states, depth, ids[prefix:])])
    everything = naive.embed(ids)
    first, own = everything[:prefix], everything[prefix:]
    for number in range(LAYERS):
        together = naive.layer(number, torch.cat([first, own]))
        first = naive.layer(number, first) if number < depth else together[:prefix]
        own = together[prefix:]
    assert float((transformer.logits(found.hidden_ND) - naive.head(own)).abs().max()) < 3e-4
    if depth < LAYERS - 1:
        assert [len(pair.keys) for pair in found.prefix] == [prefix] * LAYERS


def test_requests_of_all_depths_in_one_pass(transformer: Transformer) -> None:
    ids = tokens(80, 9)
    batch, single = [], []
    for depth in range(LAYERS + 1):
        prefix = 10 + 5 * depth
        one = behind(transformer, alone(transformer, ids[:prefix], depth), depth, ids[prefix : prefix + 3 + depth])
        batch.append(one)
        single.append(transformer.run([one])[0])
    for mine, other in zip(transformer.run(batch), single, strict=True):
        close(mine.hidden_ND, other.hidden_ND)
        for one, two in zip(mine.prefix, other.prefix, strict=True):
            close(one.keys, two.keys)


@pytest.mark.parametrize("depth", range(LAYERS + 1))
@pytest.mark.parametrize("count", [0, 1])
def test_a_request_that_is_all_or_nearly_all_prefix(transformer: Transformer, depth: int, count: int) -> None:
    ids = tokens(21)
    states = alone(transformer, ids[:20], depth)
    one = behind(transformer, states, depth, ids[20 : 20 + count])
    (found,) = transformer.run([one])
    assert found.hidden_ND.shape == (count, 192)
    (again,) = transformer.run([one, rows(tokens(5))])[:1]
    close(again.hidden_ND, found.hidden_ND)


def test_the_first_layer_of_a_prefix_is_the_same_in_every_request(transformer: Transformer) -> None:
    ids = tokens(40)
    states = alone(transformer, ids[:25], 1)
    (full,) = transformer.run([rows(ids, keep=True)])
    torch.testing.assert_close(states.known[0].keys, full.own[0].keys[:25], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(states.known[1].values, full.own[1].values[:25], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("depths", [(3, 1), (1, 3), (1, 2, 3, 4), (4, 6), (6, 4), (5,)])
def test_states_may_become_deeper_in_any_order(transformer: Transformer, depths: tuple[int, ...]) -> None:
    ids = tokens(25)
    states = alone(transformer, ids, *depths)
    (full,) = transformer.run([rows(ids, keep=True)])
    for mine, other in zip(states.known, full.own, strict=False):
        close(mine.keys, other.keys)
        close(mine.values, other.values)
    assert len(states.known) == min(max(depths) + 1, LAYERS)
    below = {depth for depth in depths if depth < LAYERS - 1}
    assert states.states.keys() == below
    assert states.bytes == 25 * 192 * 4 * (len(states.known) * 2 + len(below))
    for depth in below:
        close(states.states[depth], transformer.run([rows(ids, last=depth - 1)])[0].hidden_ND)


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


def test_rows_side_by_side_are_taken_apart_again() -> None:
    rows = torch.arange(48.0)[:, None] * torch.ones(3)
    assert pair_up(rows[:8], 8)[:, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert torch.equal(take_apart(pair_up(rows, 12), 12), rows)
    assert torch.equal(pair_up(rows[:, 0], 12), pair_up(rows, 12)[:, 0])
