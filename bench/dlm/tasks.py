"""Questions about a table that stands in the shared prefix, for the small model that was trained on them.

    lookup  prefix " key value;" for all rows       rest "? key"                               answer: the row's value
    legend  prefix " key letter;" for all rows      rest "| letter word; ... ! key"            answer: the letter's word

In `legend` the rows get their meaning from what follows on the prefix: wrong reuse shows there, and only there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

ROWS, LETTERS, END = 44, 6, 0


class Item(NamedTuple):
    """One question, as token ids."""

    prefix: list[int]
    rest: list[int]
    answer: list[int]


class Words:
    """Single tokens of the model's tokenizer.

    Args:
        folder: of the model.
    """

    def __init__(self, folder: Path) -> None:
        vocabulary: dict[str, int] = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
        self.signs = {sign: vocabulary[sign] for sign in ";|!?"}
        self.letters = [vocabulary[f"Ġ{chr(97 + place)}"] for place in range(26)]
        self.plain = sorted(number for token, number in vocabulary.items() if re.fullmatch("Ġ[a-z]{3,8}", token))[:192]


def legend(words: Words, random: np.random.Generator) -> Item:
    """A table of letters whose meaning comes after it."""
    chosen = random.permutation(words.plain)[: ROWS + LETTERS].tolist()
    keys, meanings = chosen[:ROWS], chosen[ROWS:]
    letters = random.permutation(words.letters)[:LETTERS].tolist()
    of_key = random.integers(0, LETTERS, ROWS).tolist()
    end = words.signs[";"]
    prefix = [token for key, letter in zip(keys, of_key, strict=True) for token in (key, letters[letter], end)]
    table = [token for letter, word in zip(letters, meanings, strict=True) for token in (letter, word, end)]
    asked = int(random.integers(ROWS))
    rest = [words.signs["|"], *table, words.signs["!"], keys[asked]]
    return Item(prefix, rest, [meanings[of_key[asked]]])


def lookup(words: Words, random: np.random.Generator) -> Item:
    """A table of words."""
    chosen = random.permutation(words.plain)[: 2 * ROWS].tolist()
    keys, values = chosen[:ROWS], chosen[ROWS:]
    prefix = [token for pair in zip(keys, values, strict=True) for token in (*pair, words.signs[";"])]
    asked = int(random.integers(ROWS))
    return Item(prefix, [words.signs["?"], keys[asked]], [values[asked]])


TASKS: dict[str, Callable[[Words, np.random.Generator], Item]] = {"legend": legend, "lookup": lookup}
"""By name."""


def items(folder: Path, task: str, count: int, seed: int) -> list[Item]:
    """Random items of a task."""
    words, random = Words(folder), np.random.default_rng(seed)
    return [TASKS[task](words, random) for _ in range(count)]


def right(answer: list[int], item: Item) -> bool:
    """Whether an answer is the expected one, up to its first end token."""
    return answer[: answer.index(END) if END in answer else None] == item.answer
