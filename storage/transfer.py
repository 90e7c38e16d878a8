"""The mover of bytes: loads and stores of whole chunks, their stripes in parallel over all devices.

One engine serves one lane (one worker process). All stripes of a transfer are handed to their devices in one
call; nothing waits for another tier. The owner's thread calls `poll` or `wait`; the devices' threads do the rest.
"""

from __future__ import annotations

import logging
import os
import select
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from forebay.storage.config import PoolConfig
from forebay.storage.device.base import Completion, Device, Direction, Op
from forebay.storage.health import DeviceMonitor
from forebay.storage.huge_pages import collapse
from forebay.storage.plan import DeviceHealth, Extent, LoadPlan, Memory, Span, StorePlan, TransferResult

logger = logging.getLogger(__name__)

MERGED = 1 << 20
"""Longest operation that is made of stripes next to each other (our choice: longer ones gain nothing on NVMe)."""


@dataclass(slots=True, eq=False)
class _Transfer:
    """A load or store on its way."""

    result: TransferResult
    direction: Direction
    started: float
    outstanding: dict[int, int] = field(default_factory=dict)
    """Operations not yet completed, by device."""
    checksums: dict[bytes, list[int]] = field(default_factory=dict)
    """Stores: of the stripes written so far, by key."""


class _Stripe(NamedTuple):
    """What a tag stands for."""

    job: _Transfer
    key: bytes
    number: int
    """Stripe of the chunk."""
    device: int
    expected: int | None
    """CRC-32C that a load must find; None when it is not verified."""


class TransferEngine:
    """Loads and stores chunks for one lane. One thread owns it.

    Args:
        config: the pool's configuration (deadlines, slot size).
        devices: the opened devices, in the order of `config.devices`.
        lane: this process's rank among those that store different bytes.
        lane_slots: slots of one lane on each device, as the pool counts them.
        lane_offsets: whether a device holds all lanes (files: True) or only this one (private memory: False).
    """

    def __init__(
        self,
        config: PoolConfig,
        devices: Sequence[Device],
        *,
        lane: int = 0,
        lane_slots: Sequence[int],
        lane_offsets: Sequence[bool] | None = None,
    ) -> None:
        self.config = config
        self.devices = list(devices)
        self.lane = lane
        shared = lane_offsets or [device.persistent for device in devices]
        self._base = [
            lane * slots * config.stripe if whole else 0 for slots, whole in zip(lane_slots, shared, strict=True)
        ]
        self._monitors = [DeviceMonitor(device, config.faults) for device in devices]
        self._stripes: dict[int, _Stripe] = {}
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
        self, transfer: int, chunks: Iterable[tuple[LoadPlan, Memory]], failed: Mapping[bytes, str] | None = None
    ) -> None:
        """Read chunks into memory; the result comes from `poll` under the id `transfer`.

        `failed` names keys that the caller already knows to have failed; they are part of the result.
        """
        job = self._open(transfer, failed, Direction.READ)
        batches = _Batches(self, job)
        for plan, memory in chunks:
            checksums = plan.checksums[self.lane] if plan.verify else None
            batches.add(plan.key, plan.spans, plan.extents, slice_memory(memory, plan.spans), checksums)
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
            batches.add(plan.key, plan.spans, plan.extents, pieces)
            if any(plan.copies):
                batches.add(plan.key, plan.spans, plan.copies, pieces)
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
        self._transfers.clear()
        self._stripes.clear()

    def _open(self, transfer: int, failed: Mapping[bytes, str] | None, direction: Direction) -> _Transfer:
        job = _Transfer(TransferResult(transfer, dict(failed or {})), direction, time.monotonic())
        self._transfers[transfer] = job
        return job

    def _launch(self, job: _Transfer, batches: _Batches) -> None:
        for index, ops in batches.ops.items():
            job.outstanding[index] = len(ops)
            self.devices[index].submit(ops)
        if not job.outstanding:
            self._finish(job)

    def _collect(self, index: int, completions: list[Completion]) -> None:
        """Book what one device has finished."""
        monitor = self._monitors[index]
        monitor.last_progress = now = time.monotonic()
        for completion in completions:
            stripe = self._stripes.pop(completion.tag, None)
            if stripe is None:
                monitor.end_probe(completion)
                continue
            job = stripe.job
            if completion.result < 0 or monitor.suspect:
                monitor.record(completion, job.direction)
            self._judge(stripe, completion, monitor.name)
            job.outstanding[index] -= 1
            if not job.outstanding[index]:
                del job.outstanding[index]
                job.result.device_seconds[monitor.name] = now - job.started
                if not job.outstanding:
                    self._finish(job)

    def _judge(self, stripe: _Stripe, completion: Completion, device: str) -> None:
        result = stripe.job.result
        if completion.result < 0:
            result.failed.setdefault(stripe.key, f"{device}: {os.strerror(-completion.result)}")
        elif stripe.expected is not None and completion.checksum != stripe.expected:
            result.failed.setdefault(stripe.key, f"{device}: checksum of stripe {stripe.number} does not match")
        else:
            result.bytes += completion.result
            result.device_bytes[device] = result.device_bytes.get(device, 0) + completion.result
            if stripe.job.direction is Direction.WRITE:
                stripe.job.checksums[stripe.key][stripe.number] = completion.checksum

    def _tags(self, job: _Transfer, device: int) -> list[int]:
        """What is still out of a transfer on one device."""
        return [tag for tag, stripe in self._stripes.items() if stripe.job is job and stripe.device == device]

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
            if now - job.started <= limit:
                continue
            for index in list(job.outstanding):
                monitor = self._monitors[index]
                if job.direction is Direction.WRITE and now - monitor.last_progress <= limit:
                    continue
                tags = self._tags(job, index)
                monitor.late(len(tags))
                for tag in tags:
                    reason = f"{monitor.name}: no answer within {limit:g} s"
                    job.result.failed.setdefault(self._stripes[tag].key, reason)
                self.devices[index].cancel(tags)


class _Batches:
    """The operations of one transfer, by device, while they are being gathered."""

    def __init__(self, engine: TransferEngine, job: _Transfer) -> None:
        self.ops: dict[int, list[Op]] = {}
        self._engine = engine
        self._job = job
        self._refused = {
            index: monitor.reason
            for index, monitor in enumerate(engine._monitors)
            if not monitor.accepts(job.direction)
        }

    def add(
        self,
        key: bytes,
        spans: Sequence[Span],
        extents: Sequence[Extent | None],
        pieces: Sequence[Memory],
        checksums: Sequence[int] | None = None,
    ) -> None:
        """Add a chunk: stripe i is `spans[i]` of it, at `extents[i]`, with the memory `pieces[i]`."""
        engine, job = self._engine, self._job
        stripe, direction, tag = engine.config.stripe, job.direction, engine._next_tag
        hashed = direction is Direction.WRITE or checksums is not None
        for index, extent in enumerate(extents):
            if extent is None:
                continue
            device, slot = extent
            if device in self._refused:
                job.result.failed.setdefault(key, self._refused[device])
                continue
            offset = engine._base[device] + slot * stripe
            ops = self.ops.setdefault(device, [])
            if not hashed and ops and self._extend(ops, key, offset, spans[index].length, pieces[index]):
                continue
            engine._stripes[tag] = _Stripe(job, key, index, device, checksums[index] if checksums else None)
            ops.append(Op(tag, direction, offset, spans[index].length, pieces[index], hashed))
            tag += 1
        engine._next_tag = tag

    def _extend(self, ops: list[Op], key: bytes, offset: int, length: int, memory: Memory) -> bool:
        """Let the last operation bring this stripe too, if it is the next one on the device and of the same chunk.

        Only where no checksum is wanted, which is one per stripe.
        """
        last = ops[-1]
        adjacent = last.offset + last.length == offset and last.length + length <= MERGED
        if not adjacent or self._engine._stripes[last.tag].key is not key:
            return False
        ops[-1] = last._replace(length=last.length + length, memory=_join(last.memory, memory))
        return True


def _join(first: Memory, second: Memory) -> Memory:
    """Pieces in order, those that touch as one."""
    (address, length), (begin, more) = first[-1], second[0]
    if not address or address + length != begin:
        return [*first, *second]
    return [*first[:-1], (address, length + more), *second[1:]]


def slice_memory(memory: Memory, spans: Sequence[Span]) -> list[list[tuple[int, int]]]:
    """The pieces of `memory` that each span of the chunk covers, in order.

    Address 0 (discard, zeros) stays 0 in every slice.
    """
    if len(memory) == 1 and memory[0][0]:
        start = memory[0][0]
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
