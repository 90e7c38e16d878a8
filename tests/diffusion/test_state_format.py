"""Pieces of states: what is written is read bit for bit, and nothing else is."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.diffusion.attention import KeyValues
from forebay.diffusion.prefix import PrefixStates
from forebay.diffusion.state_format import PAGE, Part, Piece, StateFormat
from tests.diffusion.test_cache import TRANSFORMER

CPU = torch.device("cpu")
LAYERS = 6
FORMATS = {
    "fp32": StateFormat(layers=LAYERS, kv_heads=4, head_size=48, hidden=192, dtype=torch.float32),
    "bf16": StateFormat(layers=LAYERS, kv_heads=4, head_size=48, hidden=192, dtype=torch.bfloat16),
    "gqa": StateFormat(layers=LAYERS, kv_heads=1, head_size=12, hidden=100, dtype=torch.bfloat16),
}
Store = dict[bytes, bytes]


def make(form: StateFormat, tokens: int, layers: int, depths: Iterable[int] = ()) -> PrefixStates:
    """States with random bits, NaNs included."""

    def noise(*shape: int) -> torch.Tensor:
        size = torch.Size(shape).numel() * form.dtype.itemsize
        return torch.randint(0, 256, (size,), dtype=torch.uint8).view(form.dtype).view(shape)

    known = [
        KeyValues(noise(tokens, form.kv_heads, form.head_size), noise(tokens, form.kv_heads, form.head_size))
        for _ in range(layers)
    ]
    states = {depth: noise(tokens, form.hidden) for depth in depths}
    return PrefixStates(torch.randint(0, 1000, (tokens,)), known, states)


def write(form: StateFormat, states: PrefixStates) -> Store:
    found = {}
    for part in form.parts(states):
        piece = form.piece(states, part)
        found[part.name] = b"".join(ctypes.string_at(*place) for place in piece.memory)
        assert len(found[part.name]) == piece.bytes
    return found


def read(form: StateFormat, tokens_P: torch.Tensor, store: Store) -> PrefixStates | None:
    blank = form.blank(tokens_P, form.usable(lambda part: part.name in store))
    for piece in blank.pieces:
        fill(piece, store[piece.part.name])
    return blank.states(CPU)


def fill(piece: Piece, content: bytes) -> None:
    assert len(content) == piece.bytes
    for address, length in piece.memory:
        ctypes.memmove(address, content[:length], length)
        content = content[length:]


def same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    assert one.shape == two.shape
    assert one.dtype == two.dtype
    return torch.equal(one.contiguous().view(torch.uint8), two.contiguous().view(torch.uint8))


def same(one: PrefixStates, two: PrefixStates) -> bool:
    pairs = [*zip(one.known, two.known, strict=True)]
    return (
        torch.equal(one.tokens_P, two.tokens_P)
        and one.limit == two.limit
        and one.states.keys() == two.states.keys()
        and all(same_bits(*both) for pair in pairs for both in zip(*pair, strict=True))
        and all(same_bits(one.states[depth], two.states[depth]) for depth in one.states)
    )


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("tokens", [1, 2, 37, 700])
def test_round_trip(form: StateFormat, tokens: int) -> None:
    states = make(form, tokens, 5, [2, 4])
    found = read(form, states.tokens_P, write(form, states))
    assert found is not None
    assert same(found, states)


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_what_is_read_into(form: StateFormat) -> None:
    """Pieces begin on pages, tensors where PyTorch has them, and one follows the other where that allows it."""
    blank = form.blank(torch.arange(100), [Part("layer", 0), Part("state", 1), Part("limit", 1)])
    for piece in blank.pieces:
        assert piece.header.data_ptr() % PAGE == piece.header.nbytes % PAGE == 0
        for tensor in piece.body:
            assert tensor.data_ptr() % 64 == 0
        assert not piece.body or piece.body[0].data_ptr() % PAGE == 0
    keys, values = blank.pieces[0].body
    assert 0 <= values.data_ptr() - keys.data_ptr() - keys.nbytes < 64


def test_writing_copies_nothing() -> None:
    form = FORMATS["bf16"]
    states = make(form, 9, 2, [1])
    for part in form.parts(states):
        mine = states.known[part.number] if part.kind == "layer" else [states.states[part.number]]
        theirs = form.piece(states, part).body
        assert [one.data_ptr() for one in mine] == [one.data_ptr() for one in theirs]


def test_growing_only_adds() -> None:
    form = FORMATS["fp32"]
    states = make(form, 5, 5, [2, 4])
    before = write(form, PrefixStates(states.tokens_P, states.known[:3], {2: states.states[2]}))
    after = write(form, states)
    assert {name: after[name] for name in before} == before
    assert set(after) - set(before) == {b"layer 3", b"layer 4", b"state 4"}


def test_a_real_model() -> None:
    form = StateFormat.of(TRANSFORMER)
    states = PrefixStates(torch.arange(40, 90))
    for depth in (3, 1, 2):
        states.deepen(TRANSFORMER, depth)
    found = read(form, states.tokens_P, write(form, states))
    assert found is not None
    assert same(found, states)
    assert found.bytes == states.bytes


@settings(max_examples=200, deadline=None)
@given(st.sets(st.integers(0, LAYERS - 1)), st.sets(st.integers(1, LAYERS - 2)), st.none() | st.integers(1, LAYERS - 1))
def test_what_is_lost_costs_what_needs_it(layers: set[int], states: set[int], limit: int | None) -> None:
    """Whatever is gone, the rest makes states that a request can use, as deep as there are any."""
    form = FORMATS["gqa"]
    whole = make(form, 3, LAYERS, range(1, LAYERS - 1))
    whole.limit = limit
    kept = {b"layer %d" % one for one in layers} | {b"state %d" % one for one in states} | {b"limit %s" % limit_(limit)}
    found = read(form, whole.tokens_P, {name: piece for name, piece in write(form, whole).items() if name in kept})
    assert found is not None
    leading = next(number for number in range(LAYERS + 1) if number not in layers)
    for depth in range(1, LAYERS):
        reusable = leading == LAYERS if depth == LAYERS - 1 else depth in states and depth < leading
        assert found.holds(depth, LAYERS) == (reusable and (limit is None or depth <= limit)), depth
    assert found.limit == limit
    assert all(depth < len(found.known) for depth in found.states)
    cut = PrefixStates(whole.tokens_P, whole.known[: len(found.known)], {b: whole.states[b] for b in found.states})
    cut.limit = limit
    assert same(found, cut)


def limit_(limit: int | None) -> bytes:
    return b"" if limit is None else b"%d" % limit


@pytest.mark.parametrize("other", [torch.arange(6), torch.tensor([0, 1, 2, 3, 5]), torch.tensor([0, 1, 2, 3])])
def test_other_tokens_under_the_same_name(other: torch.Tensor) -> None:
    """As if two prefixes had the same digest."""
    form = FORMATS["fp32"]
    states = make(form, 5, 3, [2])
    states.tokens_P = torch.arange(5)
    blank = form.blank(other, [Part("layer", 0)])
    content = write(form, states)[b"layer 0"]
    ctypes.memmove(blank.pieces[0].header.data_ptr(), content, PAGE)
    assert blank.states(CPU) is None


@pytest.mark.parametrize("name", FORMATS)
def test_another_format_under_the_same_name(name: str) -> None:
    content = write(FORMATS[name], make(FORMATS[name], 4, 1))[b"layer 0"]
    for other, form in FORMATS.items():
        blank = form.blank(torch.arange(4), [Part("layer", 0)])
        ctypes.memmove(blank.pieces[0].header.data_ptr(), content, PAGE)
        assert other == name or blank.states(CPU) is None


def test_pieces_of_each_other() -> None:
    """One piece in the place of another is noticed."""
    form = FORMATS["fp32"]
    states = make(form, 5, 3, [2])
    store = write(form, states)
    store[b"layer 1"] = store[b"layer 2"]
    assert read(form, states.tokens_P, store) is None
