"""A pool driven by hand: what an engine's adapter does, without the engine."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Self

from forebay.storage.config import PoolConfig
from forebay.storage.errors import ForebayError
from forebay.storage.lanes import open_lane
from forebay.storage.namespace import Namespace
from forebay.storage.plan import Memory, TransferResult
from forebay.storage.pool import Pool

NAMESPACE = Namespace(model="bench", weights="bench")
HUGE_PAGE = 2 << 20
BATCH_BYTES = 256 << 20
"""Bytes handed to a store at once."""


class BenchError(ForebayError):
    """A benchmark could not do what it measures."""


def keys(label: str, count: int) -> list[bytes]:
    """`count` keys as good as vLLM's: 32 bytes of SHA-256."""
    return [hashlib.sha256(f"{label}/{index}".encode()).digest() for index in range(count)]


class Memory2D:
    """Memory of `rows` rows of `row_bytes`, every page touched: the primary tier of an engine.

    Args:
        rows: how many.
        row_bytes: of each.
        shift: bytes by which the first row begins after a huge page.
        shared: as the regions that processes share: always on small pages.
    """

    def __init__(self, rows: int, row_bytes: int, shift: int = 0, *, shared: bool = False) -> None:
        self.rows, self.row_bytes = rows, row_bytes
        flags = (mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE) | mmap.MAP_ANONYMOUS
        region = mmap.mmap(-1, rows * row_bytes + 2 * HUGE_PAGE, flags=flags)
        start = -ctypes.addressof(ctypes.c_char.from_buffer(region)) % HUGE_PAGE + shift
        self._map = memoryview(region)[start : start + rows * row_bytes]
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.fill()

    def fill(self) -> None:
        """Random bytes, every row different from the others."""
        noise = os.urandom(self.row_bytes)
        for row in range(self.rows):
            self._map[row * self.row_bytes : (row + 1) * self.row_bytes] = noise
            self._map[row * self.row_bytes : row * self.row_bytes + 8] = row.to_bytes(8, "little")

    def clear(self) -> None:
        """Forget the rows' numbers, so that `check` sees what a load brought."""
        for row in range(self.rows):
            self._map[row * self.row_bytes : row * self.row_bytes + 8] = b"\xff" * 8

    def check(self, count: int) -> None:
        """Raise unless the first `count` rows are those that `fill` made, each in its place."""
        self.expect(range(count))

    def expect(self, numbers: Iterable[int]) -> None:
        """Raise unless row i is the one that `fill` made as row `numbers[i]`.

        Raises:
            BenchError: it is another.
        """
        for row, number in enumerate(numbers):
            found = int.from_bytes(self._map[row * self.row_bytes : row * self.row_bytes + 8], "little")
            if found != number:
                raise BenchError(f"row {number} came back as row {found}: the load is wrong and its time means nothing")

    def row(self, index: int) -> Memory:
        """The pieces of one row."""
        return [(self.address + index * self.row_bytes, self.row_bytes)]

    def view(self) -> memoryview:
        """The rows as vLLM's tiers see them: two dimensions of bytes."""
        return self._map.cast("B", (self.rows, self.row_bytes))


class Session:
    """An open pool, its transfer engine, and registered memory, as a context manager.

    Args:
        config: the pool.
        memory: where chunks come from and go to; chunk i of a call is row i.
        register: register the memory with the devices.
    """

    def __init__(self, config: PoolConfig, memory: Memory2D, *, register: bool = True) -> None:
        self.memory = memory
        self.pool = Pool.open(config, NAMESPACE)
        try:
            self.engine = open_lane(config)
        except BaseException:
            self.pool.close()
            raise
        if register:
            self.engine.register(memory.address, memory.rows * memory.row_bytes)
        self._transfer = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.engine.close()
        self.pool.close()

    def store(self, names: Sequence[bytes]) -> None:
        """Store row i under name i.

        Raises:
            BenchError: not all of them fit.
        """
        step = max(1, BATCH_BYTES // self.memory.row_bytes)
        for start in range(0, len(names), step):
            self._store(names[start : start + step], start)

    def load(self, names: Sequence[bytes], *, check: bool = False, verify: bool | None = None) -> TransferResult:
        """Load name i into row i; `seconds` of the result runs from before the lookup to the last stripe.

        Args:
            names: of the chunks.
            check: compare what arrives with what `Memory2D.fill` made.
            verify: checksums, instead of what the pool's configuration says.

        Raises:
            BenchError: a chunk is missing or failed.
        """
        if check:
            self.memory.clear()
        started = time.perf_counter()
        plans = self.pool.prepare_load(names)
        if verify is not None:
            for plan in plans:
                plan.verify = verify
        chunks = [(plan, self.memory.row(row)) for row, plan in enumerate(plans)]
        result = self._run(lambda transfer: self.engine.submit_load(transfer, chunks))
        result.seconds = time.perf_counter() - started
        self.pool.complete_load(names, result.failed)
        if len(plans) < len(names) or result.failed:
            why = next(iter(result.failed.values()), "evicted")
            raise BenchError(f"{len(names) - len(plans) + len(result.failed)} of {len(names)} loads failed: {why}")
        if check:
            self.memory.check(len(names))
        return result

    def bytes_by_device(self, names: Sequence[bytes]) -> list[int]:
        """Bytes of these chunks on each device."""
        totals = [0] * len(self.engine.devices)
        for plan in self.pool.prepare_load(names):
            for extent, span in zip(plan.extents, plan.spans, strict=True):
                totals[extent.device] += span.length
        self.pool.complete_load(names)
        return totals

    def _store(self, names: Sequence[bytes], start: int) -> None:
        plans = self.pool.prepare_store(names, (self.memory.row_bytes,))
        if len(plans) < len(names):
            raise BenchError(f"only {len(plans)} of {len(names)} chunks found room; make the devices larger")
        chunks = [(plan, self.memory.row(start + row)) for row, plan in enumerate(plans)]
        result = self._run(lambda transfer: self.engine.submit_store(transfer, chunks))
        self.pool.complete_store(_one_lane(result.checksums), result.failed)
        if result.failed:
            raise BenchError(f"{len(result.failed)} stores failed: {next(iter(result.failed.values()))}")

    def _run(self, submit: Callable[[int], None]) -> TransferResult:
        self._transfer += 1
        submit(self._transfer)
        results = self.engine.wait([self._transfer])
        return next(result for result in results if result.transfer == self._transfer)


def _one_lane(checksums: Mapping[bytes, Iterable[int]]) -> dict[bytes, list[tuple[int, ...]]]:
    return {key: [tuple(lane)] for key, lane in checksums.items()}
