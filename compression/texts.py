"""Calibration text: a file or a folder becomes sequences of equal length."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from forebay.compression.errors import CalibrationError

PLAIN, LINES = (".txt", ".md", ".rst", ".py"), ".jsonl"
FIELDS = ("text", "content", "prompt")

Encode = Callable[[str], Sequence[int]]


def read_documents(path: Path) -> Iterator[str]:
    """Documents of a file, or of all files below a folder, in order of their names.

    Plain text files are one document each; of JSON lines, each line is one: a string, an object with a `text`,
    `content` or `prompt`, or Dolly's instruction, context and response.

    Raises:
        CalibrationError: nothing can be read.
    """
    if not path.exists():
        raise CalibrationError(f"calibration text {path} does not exist; give a file or a folder with --text")
    files = sorted(file for file in path.rglob("*") if file.suffix in (*PLAIN, LINES)) if path.is_dir() else [path]
    if not files:
        raise CalibrationError(f"{path} has no {', '.join(PLAIN)} or {LINES} file; give a folder with text")
    for file in files:
        text = file.read_text(errors="replace")
        if file.suffix == LINES:
            yield from (
                _document(file, number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()
            )
        elif text.strip():
            yield text


def pack(
    documents: Iterator[str], encode: Encode, end: int | None, *, sequences: int, length: int, seed: int
) -> Tensor:
    """Join documents, with the end-of-text token after each, and cut them into sequences; the rest is dropped.

    Documents are shuffled first.

    Returns:
        (sequences, length), int64; fewer sequences when the text is shorter.

    Raises:
        CalibrationError: the text does not fill one sequence.
    """
    texts = list(documents)
    order = np.random.default_rng(seed).permutation(len(texts))
    tokens: list[int] = []
    for number in order:
        tokens += [*encode(texts[number]), *([] if end is None else [end])]
        if len(tokens) >= sequences * length:
            break
    count = min(sequences, len(tokens) // length)
    if not count:
        raise CalibrationError(
            f"the calibration text has {len(tokens)} tokens, less than one sequence of {length}; give more text"
        )
    return torch.tensor(tokens[: count * length]).view(count, length)


def _document(file: Path, number: int, line: str) -> str:
    try:
        found = json.loads(line)
    except ValueError:
        raise CalibrationError(f"{file}, line {number} is no JSON; correct it, or name the file .txt") from None
    if isinstance(found, str):
        return found
    if isinstance(found, dict):
        for name in FIELDS:
            if isinstance(found.get(name), str):
                return str(found[name])
        if isinstance(found.get("instruction"), str):
            parts = [("Instruction", "instruction"), ("Context", "context"), ("Response", "response")]
            return "\n\n".join(f"{title}: {found[name]}" for title, name in parts if found.get(name))
    raise CalibrationError(f"{file}, line {number} has none of {', '.join(FIELDS)}, instruction")
