"""The thread that owns a pool of prefix states: it alone speaks to the index and to the devices.

Reads start at once. Writes wait for each other, a few pieces at a time, so that what is on its way stays small beside
what the pool lets wait, and so does the host memory that an accelerator's states pass through. Imports no vLLM.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections import OrderedDict, deque
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from forebay.diffusion.prefix import PrefixStates
from forebay.diffusion.state_format import Blank, Part, Piece, StateFormat
from forebay.storage.plan import LoadPlan, TransferResult
from forebay.storage.pool import Lookup, Pool
from forebay.storage.transfer import TransferEngine

logger = logging.getLogger(__name__)

BATCH = 64 << 20
"""Bytes of pieces that are written at once (our choice: several times what a device needs to be busy)."""
BUSY, IDLE = 0.1, 1.0
"""Seconds between two looks at deadlines, and at devices that may have come back (our choice)."""


@dataclass(slots=True)
class StoreStatistics:
    """Counts since the store was opened."""

    restored: int = 0
    """Prefixes that were read."""
    restored_bytes: int = 0
    restore_seconds: float = 0.0
    """That requests waited for them."""
    stored: int = 0
    """Pieces that were written."""
    stored_bytes: int = 0
    failed_loads: int = 0
    """Prefixes that were there and could not be read, in time or at all."""
    failed_stores: int = 0
    """Prefixes of which something could not be written."""
    dropped: int = 0
    """Prefixes that were not written for lack of room or because too much was waiting."""


@dataclass(slots=True, eq=False)
class Load:
    """A prefix that someone waits for."""

    key: bytes
    tokens_P: Tensor
    """In host memory."""
    done: threading.Event = field(default_factory=threading.Event)
    blank: Blank | None = None
    """What was read; None where it is not there or could not be."""
    problem: str = ""
    """Why it could not be."""

    def end(self, problem: str = "") -> None:
        """Let the caller go on."""
        if problem:
            self.blank, self.problem = None, problem
        self.done.set()


@dataclass(slots=True, eq=False)
class Write:
    """States on their way to the pool."""

    key: bytes
    states: PrefixStates
    """As they were when they were given."""
    event: torch.cuda.Event | None = None
    """After which an accelerator's states are computed."""
    left: deque[Part] | None = None
    """Pieces not yet dealt with; None before it is its turn."""
    batch: list[Piece] = field(default_factory=list)
    """On their way at the moment."""


class StateIO(threading.Thread):
    """Reads and writes pieces until it is stopped, or breaks, which costs hits and nothing else."""

    def __init__(self, pool: Pool, engine: TransferEngine, form: StateFormat) -> None:
        super().__init__(name="forebay-states", daemon=True)
        self.statistics = StoreStatistics()
        self.broken = False
        self.held = 0
        """Bytes of the pool that are in use."""
        self._pool, self._engine, self._form = pool, engine, form
        self._loads: deque[Load] = deque()
        self._writes: OrderedDict[bytes, Write] = OrderedDict()
        self._writing: Write | None = None
        self._lock = threading.Lock()
        """Of the writes: others look at them, too."""
        self._jobs: dict[int, Load | Write] = {}
        self._next_job = 1
        self._stop_at: float | None = None
        self._said: set[str] = set()
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = select.poll()
        for descriptor in (self._event, *(device.fileno() for device in engine.devices)):
            self._poller.register(descriptor, select.POLLIN)
        self._side_stream: torch.cuda.Stream | None = None
        self._note_use()

    # ---- called by others ----

    def load(self, load: Load) -> None:
        """Read a prefix; its `done` says when."""
        self._loads.append(load)
        os.eventfd_write(self._event, 1)
        if self.broken:
            load.end()

    def write(self, write: Write, limit: int) -> bool:
        """Queue states in the place of what else is queued of their prefix, unless more than `limit` bytes wait then.

        States that are too large by themselves are written when nothing else is.
        """
        with self._lock:
            others = [one.states.bytes for key, one in self._writes.items() if key != write.key]
            if self._writing:
                others.append(self._writing.states.bytes)
            if others and sum(others) + write.states.bytes > limit:
                self.statistics.dropped += 1
                return False
            self._writes[write.key] = write
        os.eventfd_write(self._event, 1)
        return True

    def waiting(self, key: bytes) -> PrefixStates | None:
        """States of a prefix that are not written yet."""
        with self._lock:
            found = self._writes.get(key)
            if found is None and self._writing is not None and self._writing.key == key:
                found = self._writing
            return None if found is None else found.states

    def stop(self, seconds: float) -> None:
        """Write what is queued, in so many seconds at most, and close the pool."""
        self._stop_at = time.monotonic() + seconds
        os.eventfd_write(self._event, 1)

    # ---- the thread ----

    def run(self) -> None:
        """Until it is stopped."""
        try:
            while self._goes_on():
                self._turn()
        except Exception:
            logger.exception("prefix states: the pool is out of use from now on; states are computed instead")
        self.broken = True
        for load in (*self._loads, *(job for job in self._jobs.values() if isinstance(job, Load))):
            load.end("the pool is closed")
        with self._lock:
            self._writes.clear()
            self._writing = None
        self._engine.close()
        self._pool.close()

    def _goes_on(self) -> bool:
        if self._stop_at is None:
            return True
        return time.monotonic() < self._stop_at and bool(self._jobs or self._writes or self._writing)

    def _turn(self) -> None:
        self._poller.poll((BUSY if self._jobs else IDLE) * 1000)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
        results = self._engine.poll()
        for result in results:
            job = self._jobs.pop(result.transfer)
            self._end_load(job, result) if isinstance(job, Load) else self._end_write(job, result)
        self._pool.report_health(self._engine.health())
        while self._loads:
            self._start_load(self._loads[0])
            self._loads.popleft()
        self._write_more()
        if results:
            self._note_use()

    def _start_load(self, load: Load) -> None:
        pool, name = self._pool, load.key
        parts = self._form.usable(lambda part: pool.lookup(name + part.name) is Lookup.READY)
        if not any(part.kind == "layer" for part in parts):
            load.end()
            return
        try:
            load.blank = self._form.blank(load.tokens_P, parts)
        except RuntimeError as error:  # what PyTorch raises where there is no memory
            load.end(str(error))
            return
        plans = {plan.key: plan for plan in pool.prepare_load([name + part.name for part in parts])}
        chunks = [(plans.get(name + piece.part.name), piece) for piece in load.blank.pieces]
        fitting = [(plan, piece.memory) for plan, piece in chunks if plan and length(plan) == piece.bytes]
        if len(fitting) == len(chunks):
            self._engine.submit_load(self._number(load), fitting)
        else:
            pool.complete_load(plans)
            load.end("what is stored has another length")

    def _end_load(self, load: Load, result: TransferResult) -> None:
        assert load.blank is not None
        self._pool.complete_load([load.key + piece.part.name for piece in load.blank.pieces], result.failed)
        load.end(next(iter(result.failed.values()), ""))

    def _write_more(self) -> None:
        """Go on with the current states, or with the next ones."""
        while not (self._writing and self._writing.batch):
            if self._writing is None:
                with self._lock:
                    if not self._writes:
                        return
                    self._writing = self._writes.popitem(last=False)[1]
                self._writing.left = deque(self._form.parts(self._writing.states))
            if not self._start_batch(self._writing):
                self._touch(self._writing)
                self._writing = None

    def _start_batch(self, write: Write) -> bool:
        """Write some of the pieces that are not there; whether there were any, and room for them."""
        write.batch = self._gather(write)
        pieces = {write.key + piece.part.name: piece for piece in write.batch}
        plans = self._pool.prepare_store(list(pieces), lambda key: [pieces[key].bytes])
        if len(plans) < len(pieces):
            self.statistics.dropped += 1
            write.left = deque()
            out = next((device for device in self._pool.stats().devices if device.quarantined), None)
            self.say(f"device {out.name} is out of use" if out else "there is no room in the pool; make it larger")
        write.batch = [pieces[plan.key] for plan in plans]
        if plans:
            self._engine.submit_store(self._number(write), [(plan, pieces[plan.key].memory) for plan in plans])
        return bool(plans)

    def _gather(self, write: Write) -> list[Piece]:
        """The next pieces that the pool does not have."""
        assert write.left is not None
        found: list[Piece] = []
        while write.left and sum(piece.bytes for piece in found) < BATCH:
            part = write.left.popleft()
            if self._pool.lookup(write.key + part.name) is Lookup.MISS:
                with self._stream_of(write):
                    found.append(self._form.piece(write.states, part))
        return found

    def _end_write(self, write: Write, result: TransferResult) -> None:
        self._pool.complete_store({key: [lane] for key, lane in result.checksums.items()}, result.failed)
        self.statistics.stored += len(result.checksums)
        self.statistics.stored_bytes += sum(
            piece.bytes for piece in write.batch if write.key + piece.part.name in result.checksums
        )
        write.batch = []
        if result.failed:
            self.statistics.failed_stores += 1
            write.left = deque()
            self.say(f"a store failed: {next(iter(result.failed.values()))}")

    def _touch(self, write: Write) -> None:
        """The last pieces of a prefix are to leave first."""
        self._pool.touch([write.key + part.name for part in self._form.parts(write.states)])

    def _stream_of(self, write: Write) -> AbstractContextManager[object]:
        """Copies from an accelerator wait for the states to be computed, and nothing waits for the copies."""
        if write.event is None:
            return contextlib.nullcontext()
        if self._side_stream is None:
            self._side_stream = torch.cuda.Stream(write.states.known[0].keys.device)
        self._side_stream.wait_event(write.event)
        return torch.cuda.stream(self._side_stream)

    def _number(self, job: Load | Write) -> int:
        self._jobs[self._next_job] = job
        self._next_job += 1
        return self._next_job - 1

    def _note_use(self) -> None:
        """In a durable pool, what lies in memory lies elsewhere as well."""
        devices = self._pool.stats().devices
        kept = [device for device in devices if device.kind != "dram"]
        self.held = sum(device.used_bytes for device in (kept if kept and self._pool.config.durable else devices))

    def say(self, problem: str) -> None:
        """Log a problem, each once."""
        if problem not in self._said:
            self._said.add(problem)
            logger.warning("prefix states: %s", problem)


def length(plan: LoadPlan) -> int:
    """Bytes of the chunk that a plan describes."""
    return plan.spans[-1].offset + plan.spans[-1].length
