"""What two engines must have in common for the KV of one to be the KV of the other."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path

logger = logging.getLogger(__name__)

FORMAT = 1
"""Of the bytes in a chunk; raised when a new version of forebay lays them out differently."""

SAMPLE = 4096
"""Bytes read of a tensor or file at each place sampled (our choice: one page)."""
SAMPLES = 4096
"""About so many places per model (our choice: nearly every tensor of a dense model, in about a second when cold)."""
SAMPLES_PER_FILE = 64
"""At least so many places per weight file."""
SETTINGS = ("config.json", "adapter_config.json")
MAX_HEADER = 100 << 20
"""The safetensors format allows no longer header (bytes)."""
WEIGHT_SUFFIXES = (".safetensors", ".gguf", ".bin", ".pt", ".pth")
_COMMIT = re.compile(r"^[0-9a-f]{40}$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """Everything that must be equal, apart from the key itself, for a chunk to be the one asked for.

    ```python
    Namespace(model="qwen3", weights=weights_fingerprint("/models/qwen3"), dtype="bfloat16", tokens_per_block=16)
    ```
    """

    model: str
    """The served name; for people. The weights decide, so engines that call them differently share what is theirs."""
    weights: str
    """What `weights_fingerprint` says."""
    dtype: str = ""
    """Of the KV cache."""
    layout: str = ""
    """How a block's bytes are arranged."""
    tokens_per_block: int = 0
    blocks_per_chunk: int = 1
    tp: int = 1
    """Tensor-parallel size."""
    pp: int = 1
    """Pipeline-parallel size."""
    pcp: int = 1
    """Prefill-context-parallel size."""
    dcp: int = 1
    """Decode-context-parallel size."""
    groups: tuple[str, ...] = ()
    """A description of each KV-cache group."""
    format: int = FORMAT
    extra: Mapping[str, str] = field(default_factory=dict)
    """Anything else that changes the bytes."""

    def describe(self) -> str:
        """JSON, for people."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @property
    def fingerprint(self) -> bytes:
        """16 bytes of a SHA-256 of all but the served name: the first part of the name of every chunk."""
        text = json.dumps({**asdict(self), "model": ""}, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).digest()[:16]


def weights_fingerprint(model: str | os.PathLike[str], revision: str | None = None) -> str:
    """A text that differs when the weights do, whatever they are called.

    * A folder of the Hugging Face cache is known by its commit.
    * Any other folder or file is known by its content: the configuration, the weight index, and of each weight file
      the size, the header and samples from the middle of its tensors (safetensors) or evenly spaced (others).
      Weights that differ only between the samples are taken for equal: give such models different names.
    * A name that is no path is looked up in the Hugging Face cache. If it is not there, all that is left is the name
      and the revision, and a warning says so.

    Args:
        model: a folder, a file or a model id.
        revision: branch, tag or commit of a model id; default `main`.
    """
    path = Path(model)
    if path.exists():
        return _fingerprint_path(path)
    commit = _cached_commit(str(model), revision or "main")
    if commit is not None:
        return f"commit:{commit}"
    logger.warning(
        "weights of %r: no local files; name and revision stand for them, so clear the pool when they change",
        str(model),
    )
    return f"name:{model}@{revision or 'main'}"


def _fingerprint_path(path: Path) -> str:
    path = path.absolute()
    if path.parent.name == "snapshots" and _COMMIT.match(path.name):
        return f"commit:{path.name}"
    files = sorted(_files(path))
    stats = [file.stat() for file in files]
    return _fingerprint_content(
        tuple((str(file), stat.st_size, stat.st_mtime_ns, stat.st_ino) for file, stat in zip(files, stats, strict=True))
    )


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
        return
    for file in path.iterdir():
        if file.is_file() and (file.name in SETTINGS or file.name.endswith((".index.json", *WEIGHT_SUFFIXES))):
            yield file


@lru_cache(maxsize=64)
def _fingerprint_content(files: tuple[tuple[str, int, int, int], ...]) -> str:
    """Content of the files. Their times and inodes only tell the cache that it may answer."""
    digest = hashlib.sha256()
    samples = max(SAMPLES_PER_FILE, SAMPLES // max(len(files), 1))
    for name, size, *_ in files:
        digest.update(f"{Path(name).name}:{size}:".encode())
        with open(name, "rb") as file:
            if name.endswith(".json"):
                digest.update(file.read())
                continue
            for offset in _places(file.fileno(), size, samples):
                digest.update(os.pread(file.fileno(), SAMPLE, offset))
    return f"content:{digest.hexdigest()}"


def _places(fd: int, size: int, samples: int) -> list[int]:
    """Where to read a weight file: all of its header, its end, and the middle of tensors or evenly spaced places."""
    start = _header_size(fd, size)
    middles = _tensor_middles(os.pread(fd, start - 8, 8), start) if start else []
    middles = middles or [size * place // samples for place in range(samples)]
    return sorted({*range(0, start, SAMPLE), *middles[:: -(-len(middles) // samples)], max(0, size - SAMPLE)})


def _header_size(fd: int, size: int) -> int:
    """Bytes before the first tensor of a safetensors file; 0 for a file that cannot be one."""
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    return 8 + length if 8 + length <= min(size, MAX_HEADER) else 0


def _tensor_middles(header: bytes, start: int) -> list[int]:
    """The middle of each tensor of a safetensors file; none when it is not one."""
    try:
        tensors = json.loads(header)
        spans = [entry["data_offsets"] for name, entry in tensors.items() if name != "__metadata__"]
        return sorted(start + max(first, (first + last - SAMPLE) // 2) for first, last in spans)
    except (ValueError, KeyError, TypeError, AttributeError):
        return []


def _cached_commit(model: str, revision: str) -> str | None:
    """The commit of a model id in the Hugging Face cache."""
    if _COMMIT.match(revision):
        return revision
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface"))
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()
    reference = cache / f"models--{model.replace('/', '--')}" / "refs" / revision
    try:
        return reference.read_text().strip() or None
    except OSError:
        return None
