"""Questions whose table comes before the meaning of its letters: the answer needs a prefix that has seen the suffix.

prefix  " key s;" for 44 keys, s one of 6 letters      suffix  "| s word; ... ! key"      answer  the letter's word
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

KEYS, LETTERS, END = 44, 6, 0


class Item(NamedTuple):
    prefix: list[int]
    question: list[int]
    answer: list[int]


def legends(folder: Path, count: int, seed: int) -> list[Item]:
    """Random items in the words of the model's tokenizer."""
    vocabulary: dict[str, int] = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    plain = sorted(number for token, number in vocabulary.items() if re.fullmatch("Ġ[a-z]{3,8}", token))[:192]
    letters = [vocabulary[f"Ġ{chr(97 + place)}"] for place in range(26)]
    end, legend, ask = (vocabulary[sign] for sign in ";|!")
    random, items = np.random.default_rng(seed), []
    for _ in range(count):
        words = random.permutation(plain)[: KEYS + LETTERS].tolist()
        keys, meanings = words[:KEYS], words[KEYS:]
        used = random.permutation(letters)[:LETTERS].tolist()
        of_key = random.integers(0, LETTERS, KEYS).tolist()
        prefix = [token for key, letter in zip(keys, of_key, strict=True) for token in (key, used[letter], end)]
        table = [token for letter, word in zip(used, meanings, strict=True) for token in (letter, word, end)]
        asked = int(random.integers(KEYS))
        items.append(Item(prefix, [legend, *table, ask, keys[asked]], [meanings[of_key[asked]]]))
    return items
