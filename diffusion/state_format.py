"""States of prefixes as pieces of bytes, for a store that outlives the process.

A piece is never changed once it is there: there is one for the keys and values of each layer, one for each state, and
one for a limit that was found. States that become deeper add pieces, and which there are says how deep they are; so
nothing is ever half replaced, and what is lost costs only what cannot be used without it.

A piece begins with a header: the format, which piece it is, types and sizes, and all tokens of the prefix. Whoever
reads knows what it has to be, byte for byte; anything else is not what was asked for.

Shape letters: P prefix tokens, K key and value heads (of this process), S head size, D model dimension.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from forebay.diffusion.attention import KeyValues
from forebay.diffusion.prefix import PrefixStates, reuses_all
from forebay.diffusion.transformer import Transformer

FORMAT = 1
"""Raised when a new version of forebay lays pieces out differently."""
PAGE = 4096
"""Headers are whole pages, and what is read begins on one, so that devices can read straight into it (bytes)."""
ALIGNMENT = 64
"""Of tensors in memory, as PyTorch has them (bytes): some kernels give other bits for others."""


class Part(NamedTuple):
    """Which piece of a prefix's states."""

    kind: Literal["limit", "layer", "state"]
    number: int

    @property
    def name(self) -> bytes:
        """To be added to the key of the prefix."""
        return f"{self.kind} {self.number}".encode()


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece in memory."""

    part: Part
    header: Tensor
    body: tuple[Tensor, ...]
    """Contiguous, in host memory."""

    @property
    def memory(self) -> list[tuple[int, int]]:
        """(address, length) of what makes it up, in order."""
        return [(tensor.data_ptr(), tensor.nbytes) for tensor in (self.header, *self.body)]

    @property
    def bytes(self) -> int:
        """Its length."""
        return sum(length for _, length in self.memory)


@dataclass(frozen=True, kw_only=True, slots=True)
class StateFormat:
    """What the pieces of one model look like in this process."""

    layers: int
    kv_heads: int
    head_size: int
    hidden: int
    dtype: torch.dtype

    @classmethod
    def of(cls, transformer: Transformer) -> StateFormat:
        """That of a model."""
        config, layer = transformer.config, transformer.weights.layers[0]
        pairs = layer.qkv.shape[0] - layer.attention_output.shape[1]
        return cls(
            layers=config.layers,
            kv_heads=pairs // (2 * config.head_size),
            head_size=config.head_size,
            hidden=config.hidden,
            dtype=transformer.weights.norm_D.dtype,
        )

    def parts(self, states: PrefixStates) -> list[Part]:
        """All pieces of states; without its last ones, the rest is of use."""
        found = [] if states.limit is None else [Part("limit", states.limit)]
        for number in range(len(states.known)):
            found.append(Part("layer", number))
            if number in states.states:
                found.append(Part("state", number))
        return found

    def piece(self, states: PrefixStates, part: Part) -> Piece:
        """One piece of states, to be written; copied only where it is not in host memory."""
        body: Sequence[Tensor] = ()
        if part.kind != "limit":
            body = states.known[part.number] if part.kind == "layer" else (states.states[part.number],)
        header = _allocate([self.header(states.tokens_P, part)])[0]
        return Piece(part, header, tuple(tensor.contiguous().to("cpu") for tensor in body))

    def usable(self, there: Callable[[Part], bool]) -> list[Part]:
        """The pieces to read, of those that are there: as deep as they go without a gap, and no deeper than is safe."""
        limit = next((number for number in range(self.layers) if there(Part("limit", number))), None)
        deepest = self.layers - 1 if limit is None or reuses_all(limit, self.layers) else limit
        gap = (number for number in range(deepest + 1) if not there(Part("layer", number)))
        layers = next(gap, deepest + 1)
        states = [number for number in range(1, layers) if there(Part("state", number))]
        if layers < self.layers:
            layers = states[-1] + 1 if states else 0
        found = [] if limit is None else [Part("limit", limit)]
        found += [Part("layer", number) for number in range(layers)]
        return found + [Part("state", number) for number in states]

    def blank(self, tokens_P: Tensor, parts: Sequence[Part]) -> Blank:
        """Host memory for pieces that are to be read."""
        shapes = [self._shapes(part, len(tokens_P)) for part in parts]
        expected = [self.header(tokens_P, part) for part in parts]
        headers = _allocate(expected, fill=False)
        bodies = _allocate_bodies(shapes, self.dtype)
        pieces = [Piece(*one) for one in zip(parts, headers, bodies, strict=True)]
        return Blank(tokens_P, pieces, expected)

    def header(self, tokens_P: Tensor, part: Part) -> bytes:
        """What a piece begins with: whole pages."""
        sizes = f"{self.layers} {self.kv_heads} {self.head_size} {self.hidden} {self.dtype} {len(tokens_P)}"
        text = f"forebay prefix states {FORMAT}: {part.kind} {part.number} of {sizes}\n".encode()
        tokens: bytes = tokens_P.to("cpu", torch.int64).numpy().tobytes()
        return text + tokens + bytes(-len(text + tokens) % PAGE)

    def _shapes(self, part: Part, tokens: int) -> list[tuple[int, ...]]:
        if part.kind == "limit":
            return []
        return [(tokens, self.kv_heads, self.head_size)] * 2 if part.kind == "layer" else [(tokens, self.hidden)]


@dataclass(frozen=True, slots=True)
class Blank:
    """Pieces to be read into."""

    tokens_P: Tensor
    pieces: list[Piece]
    expected: list[bytes]
    """Their headers."""

    def states(self, device: torch.device) -> PrefixStates | None:
        """What was read, on a device; None where it is not what was asked for."""
        for piece, header in zip(self.pieces, self.expected, strict=True):
            if piece.header.numpy().tobytes() != header:
                return None
        found = PrefixStates(self.tokens_P.to(device))
        for kind, number, body in ((*piece.part, piece.body) for piece in self.pieces):
            if kind == "limit":
                found.limit = number
            elif kind == "layer":
                found.known.append(KeyValues(*(one.to(device) for one in body)))
            else:
                found.states[number] = body[0].to(device)
        return found


def _allocate(contents: Sequence[bytes], fill: bool = True) -> list[Tensor]:
    """Headers in host memory, each on pages of its own."""
    room = _pages(sum(map(len, contents)))
    found = list(room.split([len(content) for content in contents])) if contents else []
    if fill:
        for tensor, content in zip(found, contents, strict=True):
            tensor.numpy()[:] = memoryview(content)
    return found


def _allocate_bodies(shapes: Sequence[Sequence[tuple[int, ...]]], dtype: torch.dtype) -> list[tuple[Tensor, ...]]:
    """All of one allocation; each piece begins on a page, its tensors follow each other without a gap if they can."""
    offset, places = 0, []
    for body in shapes:
        offset += -offset % PAGE
        for shape in body:
            offset += -offset % ALIGNMENT
            places.append(offset)
            offset += torch.Size(shape).numel() * dtype.itemsize
    room, following = _pages(offset), iter(places)

    def take(shape: tuple[int, ...]) -> Tensor:
        first = next(following)
        return room[first : first + torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)

    return [tuple(take(shape) for shape in body) for body in shapes]


def _pages(size: int) -> Tensor:
    """So many bytes that begin on a page.

    On huge pages where there are any, and touched before a device reads into them: that doubled the speed of a file.
    """
    room = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        room.madvise(mmap.MADV_HUGEPAGE)
    found = torch.frombuffer(room, dtype=torch.uint8)
    found[::PAGE] = 0
    return found[:size]
