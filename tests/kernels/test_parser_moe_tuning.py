"""The choice of block sizes, with invented times: there is no GPU to take them on."""

from __future__ import annotations

import pytest
import torch

from forebay.kernels.parser_moe import triton_tuning
from forebay.kernels.parser_moe.triton_tuning import Blocks, choose

SLOW, FAST, TOO_LARGE = Blocks(1, 1), Blocks(2, 2), Blocks(3, 3)
CANDIDATES = (SLOW, FAST, TOO_LARGE)
TIMES = {SLOW: 2.0, FAST: 1.0, TOO_LARGE: float("inf")}


class Card:
    """What the choice asks of a GPU."""

    capturing = False
    timed = 0

    def milliseconds(self, blocks: Blocks, launch: object) -> float:
        self.timed += 1
        return TIMES[blocks]


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    card = Card()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: card.capturing)
    monkeypatch.setattr(triton_tuning, "milliseconds", card.milliseconds)
    monkeypatch.setattr(triton_tuning, "_chosen", {})
    return card


def test_the_fastest_is_taken_and_timed_once_per_key(card: Card):
    assert [choose(("a",), CANDIDATES, print) for _ in range(3)] == [FAST] * 3
    assert card.timed == 3
    choose(("b",), CANDIDATES, print)
    assert card.timed == 6


def test_a_capture_takes_what_was_chosen_or_the_default(card: Card):
    card.capturing = True
    assert choose(("a",), CANDIDATES, print) is SLOW
    card.capturing = False
    choose(("a",), CANDIDATES, print)
    card.capturing = True
    assert choose(("a",), CANDIDATES, print) is FAST


def test_nothing_is_timed_without_a_choice_or_a_card(card: Card, monkeypatch: pytest.MonkeyPatch):
    assert choose(("a",), (SLOW,), print) is SLOW
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose(("a",), CANDIDATES, print) is SLOW
    assert card.timed == 0
