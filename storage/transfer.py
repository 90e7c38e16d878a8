"""The mover of bytes: loads and stores of whole chunks, their stripes in parallel over all devices.

One engine serves one lane (one worker process). All stripes of a transfer are handed to their devices in one
call; nothing waits for another tier. The owner's thread calls `poll` or `wait`; the devices' threads do the rest.
"""

from __future__ import annotations

import logging
import os
import select
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from forebay.storage.config import PoolConfig
from forebay.storage.device.base import Completion, Device, Direction, Op
from forebay.storage.health import DeviceMonitor
from forebay.storage.huge_pages import collapse
from forebay.storage.plan import DeviceHealth, Extent, LoadPlan, Memory, Span, StorePlan, TransferResult

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Transfer:
    """A load or store on its way."""

    result: TransferResult
    is_load: bool
    started: float
    outstanding: dict[int, set[int]] = field(default_factory=dict)
    """Tags not yet completed, by device."""
    pending_checksums: dict[bytes, list[int]] = field(default_factory=dict)


@dataclass(slots=True)
class _Stripe:
    """What a tag stands for."""

    transfer: _Transfer
    key: bytes
    index: int
    """Stripe of the chunk."""
    length: int
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
        job = self._open(transfer, failed, is_load=True)
        batches: defaultdict[int, list[Op]] = defaultdict(list)
        for plan, memory in chunks:
            expected = plan.checksums[self.lane] if plan.verify else (None,) * len(plan.spans)
            pieces = slice_memory(memory, plan.spans)
            for index, (extent, span) in enumerate(zip(plan.extents, plan.spans, strict=True)):
                stripe = _Stripe(job, plan.key, index, span.length, expected[index])
                self._add(batches, stripe, Direction.READ, extent, pieces[index])
        self._launch(job, batches)

    def submit_store(
        self, transfer: int, chunks: Iterable[tuple[StorePlan, Memory]], failed: Mapping[bytes, str] | None = None
    ) -> None:
        """Write chunks from memory, below loads in priority; the result carries their checksums."""
        job = self._open(transfer, failed, is_load=False)
        batches: defaultdict[int, list[Op]] = defaultdict(list)
        for plan, memory in chunks:
            job.pending_checksums[plan.key] = [0] * len(plan.spans)
            pieces = slice_memory(memory, plan.spans)
            for index, (extent, copy) in enumerate(zip(plan.extents, plan.copies, strict=True)):
                for target in (extent, copy):
                    if target is not None:
                        stripe = _Stripe(job, plan.key, index, plan.spans[index].length, None)
                        self._add(batches, stripe, Direction.WRITE, target, pieces[index])
        self._launch(job, batches)

    def poll(self) -> list[TransferResult]:
        """Results that are complete since the last call. Never blocks; also enforces deadlines."""
        for index, device in enumerate(self.devices):
            for completion in device.poll():
                self._complete(index, completion)
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
                for index, tags in job.outstanding.items():
                    self.devices[index].cancel(tuple(tags))

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

    def _open(self, transfer: int, failed: Mapping[bytes, str] | None, *, is_load: bool) -> _Transfer:
        job = _Transfer(TransferResult(transfer, dict(failed or {})), is_load, time.monotonic())
        self._transfers[transfer] = job
        return job

    def _add(
        self, batches: dict[int, list[Op]], stripe: _Stripe, direction: Direction, extent: Extent, memory: Memory
    ) -> None:
        monitor = self._monitors[extent.device]
        if not monitor.accepts(direction):
            stripe.transfer.result.failed.setdefault(stripe.key, monitor.reason)
            return
        tag, self._next_tag = self._next_tag, self._next_tag + 1
        self._stripes[tag] = stripe
        stripe.transfer.outstanding.setdefault(extent.device, set()).add(tag)
        offset = self._base[extent.device] + extent.slot * self.config.stripe
        checksum = direction is Direction.WRITE or stripe.expected is not None
        batches[extent.device].append(Op(tag, direction, offset, stripe.length, memory, checksum))

    def _launch(self, job: _Transfer, batches: dict[int, list[Op]]) -> None:
        for index, ops in batches.items():
            self.devices[index].submit(ops)
        if not job.outstanding:
            self._finish(job)

    def _complete(self, index: int, completion: Completion) -> None:
        monitor = self._monitors[index]
        if monitor.owns(completion):
            return
        stripe = self._stripes.pop(completion.tag, None)
        if stripe is None:
            return
        job = stripe.transfer
        monitor.record(completion, Direction.READ if job.is_load else Direction.WRITE)
        self._judge(stripe, completion, monitor)
        job.result.device_seconds[monitor.name] = time.monotonic() - job.started
        tags = job.outstanding[index]
        tags.discard(completion.tag)
        if not tags:
            del job.outstanding[index]
            if not job.outstanding:
                self._finish(job)

    def _judge(self, stripe: _Stripe, completion: Completion, monitor: DeviceMonitor) -> None:
        result = stripe.transfer.result
        if completion.result < 0:
            result.failed.setdefault(stripe.key, f"{monitor.name}: {os.strerror(-completion.result)}")
        elif stripe.expected is not None and completion.checksum != stripe.expected:
            result.failed.setdefault(stripe.key, f"{monitor.name}: checksum of stripe {stripe.index} does not match")
        else:
            result.bytes += completion.result
            result.device_bytes[monitor.name] = result.device_bytes.get(monitor.name, 0) + completion.result
            if not stripe.transfer.is_load:
                stripe.transfer.pending_checksums[stripe.key][stripe.index] = completion.checksum

    def _finish(self, job: _Transfer) -> None:
        job.result.seconds = time.monotonic() - job.started
        for key, checksums in job.pending_checksums.items():
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
            for index, tags in list(job.outstanding.items()):
                if job.is_load or now - self._monitors[index].last_progress > limit:
                    self._monitors[index].late(len(tags))
                    for tag in tags:
                        job.result.failed.setdefault(
                            self._stripes[tag].key, f"{self._monitors[index].name}: no answer within {limit:g} s"
                        )
                    self.devices[index].cancel(tuple(tags))


def slice_memory(memory: Memory, spans: Sequence[Span]) -> list[list[tuple[int, int]]]:
    """The pieces of `memory` that each span of the chunk covers, in order.

    Address 0 (discard, zeros) stays 0 in every slice.
    """
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
