"""The mover of bytes: loads and stores of whole chunks, their stripes in parallel over all devices.

One engine serves one lane (one worker process). All stripes of a transfer are handed to their devices in one
call; nothing waits for another tier. The owner's thread calls `poll` or `wait`; the devices' threads do the rest.
"""

from __future__ import annotations

import logging
import math
import os
import select
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from forebay.storage.config import PoolConfig
from forebay.storage.device.base import Completion, Device, Direction, Op
from forebay.storage.health import DeviceMonitor
from forebay.storage.host_memory import HostMemory
from forebay.storage.huge_pages import collapse
from forebay.storage.plan import (
    NOWHERE,
    DeviceHealth,
    Extent,
    LoadPlan,
    Memory,
    Span,
    StorePlan,
    TransferResult,
    unpack,
)

logger = logging.getLogger(__name__)

MERGED = 8 << 20
"""Longest operation made of stripes that lie next to each other both on the device and in memory.

Bytes, our choice: from 1 MiB to this the CPU time per byte falls by half, beyond it no more. Never more than the
device takes at once: the kernel splits what is longer, and a control group's limit counts a part of it twice.
"""
SCATTERED = 1 << 20
"""The same where the memory is in pieces or not on whole pages: such an operation pins or copies what it moves."""
PAGE = 4096


@dataclass(slots=True, eq=False)
class _Transfer:
    """A load or store on its way."""

    result: TransferResult
    direction: Direction
    started: float
    patience: float = math.inf
    """Seconds after which it is given up, although no device has failed."""
    outstanding: dict[int, int] = field(default_factory=dict)
    """Operations not yet completed, by device."""
    checksums: dict[bytes, list[int]] = field(default_factory=dict)
    """Stores: of the stripes written so far, by key."""


@dataclass(slots=True, eq=False)
class _Run:
    """What one operation moves and its tag stands for: a stripe, or several next to each other on the device."""

    job: _Transfer
    device: int
    offset: int
    length: int
    memory: list[tuple[int, int]]
    keys: list[bytes]
    number: int
    """The stripe of its chunk, of those with a checksum, which are alone."""
    expected: int | None
    """CRC-32C that a load must find; None when it is not verified."""
    limit: int
    """Bytes that it may grow to where the memory is one piece of whole pages."""

    def take(self, key: bytes, offset: int, length: int, memory: list[tuple[int, int]]) -> bool:
        """Bring this stripe too, if it is the next one on the device and no checksum of its own is wanted."""
        if self.offset + self.length != offset or self.expected is not None:
            return False
        total = self.length + length
        address, have = self.memory[-1]
        begin, more = memory[0]
        touching = address != 0 and address + have == begin
        whole = touching and len(self.memory) == len(memory) == 1 and not (address | have | more) % PAGE
        if not whole and (total > SCATTERED or key is not self.keys[-1]):
            return False
        if total > self.limit:
            return False
        self.memory[-1:] = [(address, have + more), *memory[1:]] if touching else [(address, have), *memory]
        self.length = total
        if key is not self.keys[-1]:
            self.keys.append(key)
        return True


class TransferEngine:
    """Loads and stores chunks for one lane. One thread owns it.

    Args:
        config: the pool's configuration (deadlines, slot size).
        devices: the opened devices, in the order of `config.devices`.
        lane: this process's rank among those that store different bytes.
        lane_slots: slots of one lane on each device, as the pool counts them.
        lane_offsets: whether a device holds all lanes (files: True) or only this one (private memory: False).
        memory: what the devices share with other processes; closed after them.
    """

    def __init__(
        self,
        config: PoolConfig,
        devices: Sequence[Device],
        *,
        lane: int = 0,
        lane_slots: Sequence[int],
        lane_offsets: Sequence[bool] | None = None,
        memory: HostMemory | None = None,
    ) -> None:
        self.config = config
        self.memory = memory
        self.devices = list(devices)
        self.lane = lane
        shared = lane_offsets or [device.persistent for device in devices]
        self._base = [
            lane * slots * config.stripe if whole else 0 for slots, whole in zip(lane_slots, shared, strict=True)
        ]
        self._monitors = [DeviceMonitor(device, config.faults) for device in devices]
        self._runs: dict[int, _Run] = {}
        self._transfers: dict[int, _Transfer] = {}
        self._finished: list[TransferResult] = []
        self._next_tag = 1
        self._poller = select.poll()
        for device in devices:
            self._poller.register(device.fileno(), select.POLLIN)

    def register(self, address: int, length: int) -> bool:
        """Register memory that transfers will name, with every device. Returns whether all of them took it.

        It is moved onto huge pages first where the kernel can: pinned, it could not be any more.
        """
        collapse(address, length)
        return all([device.register(address, length) for device in self.devices])

    def submit_load(
        self,
        transfer: int,
        chunks: Iterable[tuple[LoadPlan, Memory]],
        failed: Mapping[bytes, str] | None = None,
        patience: float = math.inf,
    ) -> None:
        """Read chunks into memory; the result comes from `poll` under the id `transfer`.

        Args:
            transfer: chosen by the caller, unique among those that are out.
            chunks: plans, each with where its bytes go.
            failed: keys that the caller already knows to have failed; they are part of the result.
            patience: seconds after which what has not arrived is given up.
        """
        job = self._open(transfer, failed, Direction.READ)
        job.patience = patience
        batches = _Batches(self, job)
        for plan, memory in chunks:
            checksums = plan.lane_checksums(self.lane) if plan.verify else None
            batches.add(plan.key, plan.spans, unpack(plan.places), slice_memory(memory, plan.spans), checksums)
        self._launch(job, batches)

    def submit_store(
        self, transfer: int, chunks: Iterable[tuple[StorePlan, Memory]], failed: Mapping[bytes, str] | None = None
    ) -> None:
        """Write chunks from memory, below loads in priority; the result carries their checksums."""
        job = self._open(transfer, failed, Direction.WRITE)
        batches = _Batches(self, job)
        for plan, memory in chunks:
            job.checksums[plan.key] = [0] * len(plan.spans)
            pieces = slice_memory(memory, plan.spans)
            batches.add(plan.key, plan.spans, _places(plan.extents), pieces)
            if any(plan.copies):
                batches.add(plan.key, plan.spans, _places(plan.copies), pieces)
        self._launch(job, batches)

    def poll(self) -> list[TransferResult]:
        """Results that are complete since the last call. Never blocks; also enforces deadlines."""
        for index, device in enumerate(self.devices):
            if completions := device.poll():
                self._collect(index, completions)
        self._enforce_deadlines()
        for monitor in self._monitors:
            monitor.tend()
        finished, self._finished = self._finished, []
        return finished

    def wait(self, transfers: Collection[int] | None = None, timeout: float | None = None) -> list[TransferResult]:
        """Poll until the given transfers (all, when None) are finished or `timeout` seconds have passed."""
        end = None if timeout is None else time.monotonic() + timeout
        results = self.poll()
        while self.pending(transfers):
            left = 0.1 if end is None else min(0.1, end - time.monotonic())
            if left <= 0:
                break
            self._poller.poll(left * 1000)
            results += self.poll()
        return results

    def cancel(self, transfers: Iterable[int]) -> None:
        """Give up on what has not started of these transfers; they end soon, with failed keys."""
        for transfer in transfers:
            if job := self._transfers.get(transfer):
                for index in job.outstanding:
                    self.devices[index].cancel(self._tags(job, index))

    def pending(self, transfers: Collection[int] | None = None) -> bool:
        """Whether any of these transfers (any at all, when None) is still out."""
        if transfers is None:
            return bool(self._transfers)
        return any(transfer in self._transfers for transfer in transfers)

    def health(self) -> list[DeviceHealth]:
        """The state of every device, for `Pool.report_health`."""
        return [monitor.report() for monitor in self._monitors]

    def queue_depths(self) -> dict[str, int]:
        """Operations waiting or in flight on each device."""
        return {device.name: (stats := device.stats()).queued + stats.in_flight for device in self.devices}

    def close(self) -> None:
        """Drop what is outstanding and close the devices."""
        self.cancel(list(self._transfers))
        for device in self.devices:
            device.close()
        if self.memory is not None:
            self.memory.close()
        self._transfers.clear()
        self._runs.clear()

    def _open(self, transfer: int, failed: Mapping[bytes, str] | None, direction: Direction) -> _Transfer:
        job = _Transfer(TransferResult(transfer, dict(failed or {})), direction, time.monotonic())
        self._transfers[transfer] = job
        return job

    def _launch(self, job: _Transfer, batches: _Batches) -> None:
        direction, hashed = job.direction, job.direction is Direction.WRITE
        for device, runs in enumerate(batches.runs):
            if not runs:
                continue
            job.outstanding[device] = len(runs)
            tagged = dict(enumerate(runs, self._next_tag))
            self._runs |= tagged
            self._next_tag += len(runs)
            self.devices[device].submit(
                [
                    Op(tag, direction, run.offset, run.length, run.memory, hashed or run.expected is not None)
                    for tag, run in tagged.items()
                ]
            )
        if not job.outstanding:
            self._finish(job)

    def _collect(self, index: int, completions: list[Completion]) -> None:
        """Book what one device has finished."""
        monitor = self._monitors[index]
        monitor.last_progress = time.monotonic()
        runs, name = self._runs, monitor.name
        for completion in completions:
            run = runs.pop(completion.tag, None)
            if run is None:
                monitor.end_probe(completion)
                continue
            job = run.job
            if completion.result < 0 or monitor.suspect:
                monitor.record(completion, job.direction)
            _judge(run, completion, name)
            took = job.result.device_seconds
            if completion.seconds > took.get(name, -1.0):
                took[name] = completion.seconds
            left = job.outstanding[index] = job.outstanding[index] - 1
            if not left:
                del job.outstanding[index]
                if not job.outstanding:
                    self._finish(job)

    def _tags(self, job: _Transfer, device: int) -> list[int]:
        """What is still out of a transfer on one device."""
        return [tag for tag, run in self._runs.items() if run.job is job and run.device == device]

    def _finish(self, job: _Transfer) -> None:
        job.result.seconds = time.monotonic() - job.started
        for key, checksums in job.checksums.items():
            if key not in job.result.failed:
                job.result.checksums[key] = tuple(checksums)
        del self._transfers[job.result.transfer]
        self._finished.append(job.result)

    def _enforce_deadlines(self) -> None:
        """A load is late after the deadline; a store when its device has made no progress for as long.

        A store may wait behind any number of loads, so only silence counts against it (our choice).
        """
        now = time.monotonic()
        limit = self.config.faults.deadline
        for job in list(self._transfers.values()):
            if now - job.started > job.patience:
                self._give_up(job)
            if now - job.started <= limit:
                continue
            for index in list(job.outstanding):
                monitor = self._monitors[index]
                if job.direction is Direction.WRITE and now - monitor.last_progress <= limit:
                    continue
                tags = self._tags(job, index)
                monitor.late(len(tags))
                for tag in tags:
                    _fail(self._runs[tag], f"{monitor.name}: no answer within {limit:g} s")
                self.devices[index].cancel(tags)

    def _give_up(self, job: _Transfer) -> None:
        """End a load that takes longer than it is worth. The devices are slow, not broken: it is not held against them.

        What they are about to write to memory still has to end first.
        """
        job.patience, given_up = math.inf, job.patience
        for index in list(job.outstanding):
            tags = self._tags(job, index)
            for tag in tags:
                job.result.late.update(key for key in self._runs[tag].keys if key not in job.result.failed)
                _fail(self._runs[tag], f"{self.devices[index].name}: given up after {given_up:.3g} s")
            self.devices[index].cancel(tags)


class _Batches:
    """The operations of one transfer, by device, while they are being gathered."""

    def __init__(self, engine: TransferEngine, job: _Transfer) -> None:
        self.runs: list[list[_Run]] = [[] for _ in engine.devices]
        self._job = job
        self._base = engine._base
        self._stripe = engine.config.stripe
        self._merge = job.direction is Direction.READ
        self._limits = [min(MERGED, device.largest) for device in engine.devices]
        self._refused = {
            index: monitor.reason
            for index, monitor in enumerate(engine._monitors)
            if not monitor.accepts(job.direction)
        }

    def add(
        self,
        key: bytes,
        spans: Sequence[Span],
        places: Sequence[int],
        pieces: Sequence[list[tuple[int, int]]],
        checksums: Sequence[int] | None = None,
    ) -> None:
        """Add a chunk: stripe i is `spans[i]` of it, at `places[i]`, with the memory `pieces[i]`."""
        for index, place in enumerate(places):
            if place == NOWHERE:
                continue
            device = place >> 32
            if device in self._refused:
                self._job.result.failed.setdefault(key, self._refused[device])
                continue
            offset = self._base[device] + (place & 0xFFFFFFFF) * self._stripe
            length, memory = spans[index].length, pieces[index]
            expected = checksums[index] if checksums else None
            runs = self.runs[device]
            if self._merge and expected is None and runs and runs[-1].take(key, offset, length, memory):
                continue
            runs.append(_Run(self._job, device, offset, length, memory, [key], index, expected, self._limits[device]))


def _places(extents: Sequence[Extent | None]) -> list[int]:
    return [NOWHERE if extent is None else extent.device << 32 | extent.slot for extent in extents]


def _judge(run: _Run, completion: Completion, device: str) -> None:
    """Add what became of a run to its transfer's result."""
    result = run.job.result
    if completion.result < 0:
        _fail(run, f"{device}: {os.strerror(-completion.result)}")
    elif run.expected is not None and completion.checksum != run.expected:
        _fail(run, f"{device}: checksum of stripe {run.number} does not match")
    else:
        result.bytes += completion.result
        result.device_bytes[device] = result.device_bytes.get(device, 0) + completion.result
        if run.job.direction is Direction.WRITE:
            run.job.checksums[run.keys[0]][run.number] = completion.checksum


def _fail(run: _Run, reason: str) -> None:
    for key in run.keys:
        run.job.result.failed.setdefault(key, reason)


def slice_memory(memory: Memory, spans: Sequence[Span]) -> list[list[tuple[int, int]]]:
    """The pieces of `memory` that each span of the chunk covers, in order.

    Address 0 (discard, zeros) stays 0 in every slice.
    """
    if len(memory) == 1 and (start := memory[0][0]):
        if len(spans) == 1:
            return [[(start + spans[0].offset, spans[0].length)]]
        return [[(start + span.offset, span.length)] for span in spans]
    slices: list[list[tuple[int, int]]] = []
    pieces = iter(memory)
    address, left = next(pieces, (0, 0))
    for span in spans:
        need = span.length
        taken: list[tuple[int, int]] = []
        while need:
            if not left:
                address, left = next(pieces)
            length = min(left, need)
            taken.append((address, length))
            address = address + length if address else 0
            left -= length
            need -= length
        slices.append(taken)
    return slices
