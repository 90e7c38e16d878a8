"""Backbone, importance, sampling and text, each against an oracle."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from forebay.compression.backbone import barycenter, mean_backbone
from forebay.compression.errors import CalibrationError
from forebay.compression.experts import Expert
from forebay.compression.importance import ACTIVATIONS, hidden, output_importance
from forebay.compression.layer import Options, compress_layer
from forebay.compression.reservoir import Reservoir
from forebay.compression.selection import select_budget, select_layer
from forebay.compression.texts import pack, read_documents


def make(seed: int, experts: int = 5, units: int = 12, size: int = 8) -> list[Expert]:
    """Experts with a common part, their units shuffled."""
    random = torch.Generator().manual_seed(seed)
    base = [torch.randn(shape, generator=random) for shape in ((units, size), (units, size), (size, units))]
    made = []
    for _ in range(experts):
        own = Expert(*(part + 0.3 * torch.randn(part.shape, generator=random) for part in base))
        made.append(own.permuted(torch.randperm(units, generator=random)))
    return made


def forward(rows, expert):
    return hidden(rows, expert) @ expert.down_DH.T


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_importance_is_the_expected_change_of_the_output(activation):
    """Against the direct expectation in float64."""
    full, base = make(3)[:2]
    rows = torch.randn(700, 8, generator=torch.Generator().manual_seed(4))
    found = output_importance(rows, full, base, ACTIVATIONS[activation])
    wide = [one.to(torch.float64) for one in (full, base)]
    own, shared = (hidden(rows.double(), one, ACTIVATIONS[activation]) for one in wide)
    for unit in range(12):
        change = own[:, unit, None] * wide[0].down_DH[:, unit] - shared[:, unit, None] * wide[1].down_DH[:, unit]
        assert float(found[unit]) == pytest.approx(float(change.square().sum(1).mean()), rel=1e-5)


def test_aligning_changes_no_expert():
    experts = make(1)
    found = barycenter(experts)
    rows = torch.randn(20, 8)
    for expert, order in zip(experts, found.transport_EH):
        assert sorted(order.tolist()) == list(range(12))
        torch.testing.assert_close(forward(rows, expert.permuted(order)), forward(rows, expert), rtol=1e-4, atol=1e-5)


def test_planted_permutations_are_found():
    """The aligned experts are far closer to their barycenter than the unaligned are to their mean."""
    experts = make(2)

    def spread(backbone):
        parts = [one.permuted(order) - backbone.weights for one, order in zip(experts, backbone.transport_EH)]
        return sum(float(part.cloud().square().sum()) for part in parts)

    assert spread(barycenter(experts)) < 0.3 * spread(mean_backbone(experts))


def plainly(experts: list[Expert], rounds: int = 100) -> tuple[torch.Tensor, torch.Tensor]:
    """The barycenter by its definition, in float64: every cost, in every round."""
    clouds = [expert.cloud().double() for expert in experts]
    points, before = clouds[0], None
    for _ in range(rounds):
        transport = [linear_sum_assignment(torch.cdist(points, cloud).square().numpy())[1] for cloud in clouds]
        if before is not None and all((one == two).all() for one, two in zip(transport, before)):
            break
        points = torch.stack([cloud[order] for cloud, order in zip(clouds, transport)]).mean(0)
        before = transport
    return points, torch.from_numpy(np.stack(transport))


@pytest.mark.parametrize(("units", "size"), [(40, 8), (40, 64), (1, 3)])
@pytest.mark.parametrize("seed", range(4))
def test_the_barycenter_by_its_definition(seed, units, size):
    """Whether costs are kept from round to round (few units) or not (more units than dimensions)."""
    random = torch.Generator().manual_seed(seed)
    parts = [torch.randn(6, *shape, generator=random) for shape in ((units, size), (units, size), (size, units))]
    experts = [Expert(*weights) for weights in zip(*parts)]
    found, (points, transport) = barycenter(experts), plainly(experts)
    assert torch.equal(found.transport_EH, transport)
    torch.testing.assert_close(found.weights.cloud().double(), points, rtol=1e-5, atol=1e-5)


def test_the_order_of_units_does_not_matter():
    """Compressing experts whose units are shuffled gives experts that compute the same."""
    experts, rows = make(5), [torch.randn(60, 8, generator=torch.Generator().manual_seed(e)) for e in range(5)]
    shuffled = [experts[0], *(one.permuted(torch.randperm(12)) for one in experts[1:])]
    first, second = (compress_layer(some, rows, Options(rho=0.6)) for some in (experts, shuffled))
    for expert in range(5):
        torch.testing.assert_close(
            forward(rows[expert], first.dense(expert)),
            forward(rows[expert], second.dense(expert)),
            rtol=1e-3,
            atol=1e-4,
        )


def test_rho_0_is_the_model():
    experts, rows = make(6), [torch.randn(10, 8) for _ in range(5)]
    made = compress_layer(experts, rows, Options(rho=0))
    for expert in range(5):
        torch.testing.assert_close(
            forward(rows[expert], made.dense(expert)), forward(rows[expert], experts[expert]), rtol=1e-4, atol=1e-5
        )


@settings(max_examples=60)
@given(st.integers(0, 10_000), st.floats(0, 1), st.integers(0, 6))
def test_selection_keeps_the_best(seed, rho, floor):
    random = torch.Generator().manual_seed(seed)
    scores = [torch.rand(int(n), generator=random) for n in torch.randint(1, 12, (4,), generator=random)]
    kept = select_layer(scores, rho, floor)
    assert all(len(units) >= min(floor, len(one)) for units, one in zip(kept, scores))
    dropped = [float(v) for one, units in zip(scores, kept) for i, v in enumerate(one) if i not in units.tolist()]
    above = [
        float(one[i])
        for one, units in zip(scores, kept)
        for i in units
        if i not in one.topk(min(floor, len(one))).indices
    ]
    assert not above or not dropped or min(above) >= max(dropped)
    assert sum(map(len, select_budget([scores[:2], scores[2:]], 9, 0)[0])) <= 9


@settings(max_examples=25)
@given(st.lists(st.integers(0, 40), max_size=8), st.integers(1, 20))
def test_reservoir_keeps_rows_that_were_offered(batches, capacity):
    store, count = Reservoir(capacity, 0), 0
    for size in batches:
        store.offer(torch.arange(count, count + size).float()[:, None])
        count += size
    values = store.rows().flatten().tolist()
    assert store.seen == count
    assert len(values) == len(set(values)) == min(count, capacity)
    assert all(0 <= value < count for value in values)


def test_reservoir_is_fair():
    hits: Counter[int] = Counter()
    for seed in range(400):
        store = Reservoir(10, seed)
        for start in range(0, 100, 7):
            store.offer(torch.arange(start, min(start + 7, 100)).float()[:, None])
        hits.update(int(value) for value in store.rows().flatten())
    assert all(15 < hits[row] < 70 for row in range(100))  # 40 expected, 6 the standard deviation


def test_packing_fills_sequences():
    found = pack(iter(["ab", "cde"]), lambda text: [ord(c) for c in text], 0, sequences=3, length=2, seed=0)
    flat = found.flatten().tolist()
    assert found.shape == (3, 2)
    assert flat in ([97, 98, 0, 99, 100, 101], [99, 100, 101, 0, 97, 98])
    with pytest.raises(CalibrationError, match="has 3 tokens, less than one sequence of 8"):
        pack(iter(["ab"]), lambda text: [1, 2], 0, sequences=1, length=8, seed=0)


def test_documents_of_every_kind(tmp_path):
    (tmp_path / "a.txt").write_text("plain")
    lines = ["just text", {"text": "field"}, {"instruction": "Do", "context": "", "response": "Done"}]
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "c.bin").write_bytes(b"\0")
    assert list(read_documents(tmp_path)) == ["plain", "just text", "field", "Instruction: Do\n\nResponse: Done"]
    for name, content, message in (
        ("d.jsonl", "{", r"d.jsonl, line 1 is no JSON"),
        ("e.jsonl", '{"x": 1}', "line 1 has none of text"),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(CalibrationError, match=message):
            list(read_documents(tmp_path / name))
    with pytest.raises(CalibrationError, match="does not exist; give a file or a folder with --text"):
        list(read_documents(tmp_path / "absent"))
