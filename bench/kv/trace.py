"""Serving traces in Mooncake's format: JSON lines of arrival, lengths and the prefix blocks of each request.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353, 2354]}

`timestamp` is in milliseconds; every id stands for 512 tokens of input together with all that comes before them, so two
requests share a prefix as far as their ids agree.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from forebay.storage.errors import ConfigError

BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Request:
    """One line of a trace."""

    arrival: float
    """Seconds after the first."""
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]

    def tokens(self, blocks: int) -> int:
        """Input tokens in the first `blocks` blocks; the last block of a request may be short."""
        return min(blocks * BLOCK_TOKENS, self.input_tokens)


def read_trace(path: Path, limit: int = 0) -> list[Request]:
    """The first `limit` requests (all, when 0), in order of arrival.

    Raises:
        ConfigError: the file cannot be read, is empty, or a line is not of the format; the message names the line.
    """
    requests: list[Request] = []
    try:
        with path.open() as lines:
            for number, line in enumerate(lines, 1):
                if limit and len(requests) == limit:
                    break
                if line.strip():
                    requests.append(_parse(line, f"{path}, line {number}"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--trace {path}: cannot be read ({error}); give a file of JSON lines") from None
    if not requests:
        raise ConfigError(f"--trace {path}: no request in it; give a file of JSON lines in Mooncake's format")
    return sorted(requests, key=lambda request: request.arrival)


def block_key(block: int) -> bytes:
    """The key of a block in a pool: 32 bytes, as vLLM's are."""
    return hashlib.sha256(b"block %d" % block).digest()


def repeated_share(requests: Sequence[Request]) -> float:
    """Blocks that an earlier request has had already / all blocks: the hit rate of a pool that never evicts."""
    seen: set[int] = set()
    repeated = 0
    for request in requests:
        repeated += sum(block in seen for block in request.blocks)
        seen.update(request.blocks)
    return repeated / max(1, sum(len(request.blocks) for request in requests))


def _parse(line: str, where: str) -> Request:
    try:
        record = json.loads(line)
        return Request(
            arrival=float(record["timestamp"]) / 1e3,
            input_tokens=int(record["input_length"]),
            output_tokens=int(record["output_length"]),
            blocks=tuple(int(block) for block in record["hash_ids"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        problem = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(
            f"{where}: {problem}; each line needs timestamp, input_length, output_length and hash_ids"
        ) from None
