"""Which weights a folder holds, in a few bytes."""

from __future__ import annotations

import hashlib
from pathlib import Path

SAMPLES, SAMPLE = 64, 4096
"""Pieces of each file of weights that are looked at, and bytes of a piece."""


def fingerprint(folder: Path) -> str:
    """32 hex digits that change with the configuration or the weights of a model, and not with its place.

    Of weights, the beginning (which names every tensor), the end and pieces spread over the rest are read, not all:
    a fine-tune changes nearly every byte, and reading a large model takes minutes. Our choice.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path in [folder / "config.json", *sorted(folder.glob("*.safetensors"))]:
        if path.exists():
            digest.update(f"{path.name} {path.stat().st_size} ".encode())
            _sample(path, digest)
    return digest.hexdigest()


def _sample(path: Path, digest: hashlib.blake2b) -> None:
    last = max(0, path.stat().st_size - SAMPLE)
    with path.open("rb") as file:
        for place in sorted({last * number // (SAMPLES - 1) for number in range(SAMPLES)}):
            file.seek(place)
            digest.update(file.read(SAMPLE))
