"""Sequences for profiling: windows of documents, and chats whose last question comes after everything else."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from forebay.diffusion.depth import share
from forebay.diffusion.errors import DiffusionError
from forebay.diffusion.tokenizer import Encode, Message, Render

PLAIN, LINES = (".txt", ".md", ".rst", ".py"), ".jsonl"
SHORTEST = 100
"""Tokens of a window at least: one for each per cent."""


class Sample(NamedTuple):
    """A sequence, and where prefixes end in it."""

    tokens: list[int]
    prefixes: dict[int, int]
    """Share in percent -> tokens."""


@dataclass(slots=True)
class Texts:
    """What a folder holds."""

    documents: list[str]
    chats: list[list[Message]]


def read_texts(path: Path) -> Texts:
    """All of a file, or of the files below a folder, in order of their names.

    A line of a `.jsonl` file is a chat (`messages`) or a document (a string, or `text`).

    Raises:
        DiffusionError: there is no text.
    """
    if not path.exists():
        raise DiffusionError(f"--text {path} does not exist; give a file or a folder")
    files = sorted(file for file in path.rglob("*") if file.suffix in (*PLAIN, LINES)) if path.is_dir() else [path]
    found = Texts([], [])
    for file in files:
        text = file.read_text(errors="replace")
        if file.suffix != LINES:
            found.documents.append(text)
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                _read_line(f"{file}, line {number}", line, found)
    if not found.documents and not found.chats:
        raise DiffusionError(f"--text {path} has no {', '.join(PLAIN)} or {LINES} file; give a folder with text")
    return found


def _read_line(place: str, line: str, found: Texts) -> None:
    try:
        data = json.loads(line)
    except ValueError:
        raise DiffusionError(f"{place} is no JSON; correct it, or name the file .txt") from None
    text = data if isinstance(data, str) else data.get("text") if isinstance(data, dict) else None
    if isinstance(text, str):
        found.documents.append(text)
    elif isinstance(data, dict) and _is_chat(data.get("messages")):
        found.chats.append(data["messages"])
    else:
        raise DiffusionError(f"{place} has neither `text` nor `messages` with `role` and `content`")


def _is_chat(messages: object) -> bool:
    return isinstance(messages, list) and all(
        isinstance(one, dict) and isinstance(one.get("role"), str) and isinstance(one.get("content"), str)
        for one in messages
    )


def draw_samples(
    texts: Texts, encode: Encode, render: Render, shares: Sequence[int], *, samples: int, length: int, limit: int,
    seed: int,
) -> list[Sample]:  # fmt: skip
    """As many sequences as give every share its samples: chats first, windows of documents for what is left.

    One sequence serves many shares, since what follows on a prefix does not depend on where the prefix ends.

    Args:
        texts: what there is.
        encode: text -> tokens.
        render: chat -> text.
        shares: in percent, ascending.
        samples: for each share, at most.
        length: tokens of a window of a document.
        limit: tokens of a chat, at most.
        seed: of the choice.

    Raises:
        DiffusionError: nothing is long enough.
    """
    random = np.random.default_rng(seed)
    missing = dict.fromkeys(shares, samples)
    found = []
    for one in (*_chats(texts, encode, render, limit, shares, random), *_windows(texts, encode, length, random)):
        wanted = one.prefixes or {percent: round(percent * len(one.tokens) / 100) for percent in shares}
        wanted = {percent: count for percent, count in wanted.items() if missing[percent]}
        for percent in wanted:
            missing[percent] -= 1
        if wanted:
            found.append(Sample(one.tokens, wanted))
        if not any(missing.values()):
            break
    if not found:
        raise DiffusionError(
            f"no document has {SHORTEST} tokens, and no chat a turn before its last question and at most {limit} "
            f"tokens; give more text"
        )
    return found


def _chats(
    texts: Texts, encode: Encode, render: Render, limit: int, shares: Sequence[int], random: np.random.Generator
) -> Iterator[Sample]:
    for number in random.permutation(len(texts.chats)):
        found = _chat(texts.chats[number], encode, render)
        if found is None or len(found[0]) > limit:
            continue
        tokens, prefix = found
        # The next larger share, so that no depth is allowed below the share that it was measured at.
        bucket = next((one for one in shares if one >= share(prefix, len(tokens))), None)
        if bucket is not None:
            yield Sample(tokens, {bucket: prefix})


def _chat(messages: list[Message], encode: Encode, render: Render) -> tuple[list[int], int] | None:
    """Tokens up to the last question, and how many of them come before it; None where there are none."""
    last = next((place for place in reversed(range(len(messages))) if messages[place]["role"] == "user"), 0)
    if not last:
        return None
    try:
        tokens, before = encode(render(messages[: last + 1], True)), encode(render(messages[:last], False))
    except DiffusionError:  # the template wants other roles in another order
        return None
    prefix = _common(before, tokens)
    return (tokens, prefix) if 0 < prefix < len(tokens) else None


def _windows(texts: Texts, encode: Encode, length: int, random: np.random.Generator) -> Iterator[Sample]:
    """One of each document in turn, so that few samples come from many documents."""
    turns = deque(
        _cut(texts.documents[number], encode, length, random) for number in random.permutation(len(texts.documents))
    )
    while turns:
        windows = turns.popleft()
        window = next(windows, None)
        if window is not None:
            yield Sample(window, {})
            turns.append(windows)


def _cut(document: str, encode: Encode, length: int, random: np.random.Generator) -> Iterator[list[int]]:
    tokens = encode(document)
    for number in random.permutation(-(-len(tokens) // length)):
        window = tokens[number * length : (number + 1) * length]
        if len(window) >= SHORTEST:
            yield window


def _common(one: Sequence[int], two: Sequence[int]) -> int:
    """Tokens that both begin with."""
    differ = (place for place, (mine, other) in enumerate(zip(one, two, strict=False)) if mine != other)
    return next(differ, min(len(one), len(two)))
