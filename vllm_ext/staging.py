"""The worker for KV tensors on an accelerator: chunks pass through pinned host buffers.

Devices read into a buffer, then the pages are copied to the accelerator on a side stream; stores go the other
way. Nothing waits: every step is started by `take_results` when the one before it has finished. Works on any
device that torch knows, the CPU included, where streams and events are no-ops.
"""

from __future__ import annotations

import ctypes
import logging
import math
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, LoadStoreSpec

from forebay.storage.host_memory import HostMemory
from forebay.storage.plan import LoadPlan, StorePlan, TransferResult
from forebay.storage.transfer import TransferEngine
from forebay.vllm_ext.layout import ChunkLayout
from forebay.vllm_ext.metadata import ForebayLoadSpec, ForebayStoreSpec
from forebay.vllm_ext.worker import ForebayWorker, plan_length

logger = logging.getLogger(__name__)

STAGING_BYTES = 256 << 20
"""Pinned memory per worker: 25 GB/s over a PCIe 4 x16 link for 10 ms, the latency of a deep SSD queue (our choice)."""


@dataclass(slots=True, eq=False)
class _Job:
    """A vLLM job and what it still waits for."""

    result: TransferResult
    is_load: bool
    left: int
    """Chunks not ended, plus one until all of them are queued."""
    started: float = field(default_factory=time.monotonic)
    patience: float = math.inf
    """Seconds after which what is not yet in a buffer is given up."""

    @property
    def time_left(self) -> float:
        """Seconds of patience."""
        return self.started + self.patience - time.monotonic()

    def leave(self) -> bool:
        """Count one down; whether it was the last."""
        self.left -= 1
        return not self.left


@dataclass(slots=True, eq=False)
class _Chunk:
    """One chunk of a job on its way through a buffer."""

    job: _Job
    plan: LoadPlan | StorePlan
    group: int
    blocks: list[int | None]
    buffer: int = -1
    sent: float = 0.0
    """When the devices were given it, in seconds after the start of the job."""
    event: torch.Event | None = field(default=None)
    """The copy between the buffer and the accelerator; None before it was started."""


class StagedWorker(ForebayWorker):
    """Moves chunks between the devices and accelerator memory through a ring of pinned buffers."""

    def __init__(self, engine: TransferEngine, kv_caches: CanonicalKVCaches, layout: ChunkLayout) -> None:
        super().__init__(engine, kv_caches, layout, register=False)
        self._device = kv_caches.tensors[0].tensor.device
        self._module = torch.get_device_module(self._device)
        self._streams = {True: self._module.Stream(), False: self._module.Stream()}
        """One stream for loads, one for stores."""
        self._buffers: list[torch.Tensor] = []
        self._free: list[int] = []
        self._queues: dict[bool, deque[_Chunk]] = {True: deque(), False: deque()}
        """Chunks without a buffer, loads and stores."""
        self._at_devices: dict[int, _Chunk] = {}
        self._copying: list[_Chunk] = []
        self._stores_in_buffers = 0
        self._next = 0
        if engine.memory is not None and self._device.type == "cuda":
            _pin(engine.memory)
        self._jobs: dict[int, _Job] = {}
        self._ended: list[TransferResult] = []

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """Queue the chunks of a load."""
        assert isinstance(src_spec, ForebayLoadSpec)
        ids = list(self.layout.chunks(src_spec.groups, dst_spec))
        self._blocks[job_id] = {
            key: [block for block in blocks if block is not None]
            for key, blocks in zip(src_spec.keys, ids, strict=True)
        }
        missing = {key: "no longer in the pool" for key in src_spec.keys if key not in src_spec.plans}
        job = self._open(job_id, missing, is_load=True)
        job.patience = src_spec.patience
        for key, group, blocks in zip(src_spec.keys, src_spec.groups, ids, strict=True):
            if plan := src_spec.plans.get(key):
                self._enqueue(_Chunk(job, plan, group, blocks))
        return self._start(job)

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        """Queue the chunks of a store; their pages are read once the work now on the compute stream is done."""
        assert isinstance(dst_spec, ForebayStoreSpec)
        self._streams[False].wait_stream(self._module.current_stream())
        job = self._open(job_id, {}, is_load=False)
        ids = self.layout.chunks(dst_spec.groups, src_spec)
        for plan, group, blocks in zip(dst_spec.plans, dst_spec.groups, ids, strict=True):
            self._enqueue(_Chunk(job, plan, group, blocks))
        return self._start(job)

    def take_results(self) -> list[TransferResult]:
        """Push every chunk one step further; the jobs that have ended."""
        self._pump(self.engine.poll())
        ended, self._ended = self._ended, []
        return ended

    def rest(self, seconds: float) -> None:
        """Sleep, unless a transfer ends before: the next step of its chunk is then due."""
        self._pump(self.engine.wait(list(self._at_devices)[:1] or None, timeout=seconds))

    def wait(self, job_ids: Iterable[int]) -> None:
        """Let go of the blocks of these jobs: stores not yet in a buffer are dropped, copies and loads are awaited."""
        jobs = [self._jobs[job] for job in job_ids if job in self._jobs]
        for chunk in [chunk for chunk in self._queues[False] if chunk.job in jobs]:
            self._queues[False].remove(chunk)
            self._end(chunk, "dropped: its blocks are needed")
        while any(self._holds_blocks(job) for job in jobs):
            for chunk in self._copying:
                if chunk.event is not None:
                    chunk.event.synchronize()
            self._pump(self.engine.wait(timeout=0.01))

    def _holds_blocks(self, job: _Job) -> bool:
        """A load until it ends; a store until its pages are in buffers."""
        if job.is_load:
            return job.left > 0
        return any(chunk.job is job for chunk in self._copying)

    def _open(self, job_id: int, failed: dict[bytes, str], *, is_load: bool) -> _Job:
        job = self._jobs[job_id] = _Job(TransferResult(job_id, failed), is_load, left=1)
        return job

    def _enqueue(self, chunk: _Chunk) -> None:
        chunk.job.left += 1
        if problem := self._misfit(chunk.group, plan_length(chunk.plan)):
            self._end(chunk, problem)
        else:
            self._queues[chunk.job.is_load].append(chunk)

    def _start(self, job: _Job) -> bool:
        if job.leave():
            self._finish(job)
        self._pump([])
        return True

    def _pump(self, results: list[TransferResult]) -> None:
        for result in results:
            if result.transfer < 0:
                self._ended.append(result)
            else:
                self._arrived(self._at_devices.pop(result.transfer), result)
        for chunk in [chunk for chunk in self._copying if chunk.event is not None and chunk.event.query()]:
            self._copying.remove(chunk)
            self._copied(chunk)
        self._fill_buffers()

    def _fill_buffers(self) -> None:
        """Give buffers to waiting chunks, loads first; stores hold at most half of the ring."""
        for chunk in [chunk for chunk in self._queues[True] if chunk.job.time_left < 0]:
            self._queues[True].remove(chunk)
            chunk.job.result.late.add(chunk.plan.key)
            self._end(chunk, f"given up after {chunk.job.patience:.3g} s")
        while self._queues[True] and self._acquire(self._queues[True][0]):
            chunk = self._queues[True].popleft()
            self._to_devices(chunk)
        while (
            self._queues[False]
            and (self._stores_in_buffers + 1) * 2 <= max(2, self._ring_size(self._queues[False][0]))
            and self._acquire(self._queues[False][0])
        ):
            self._stores_in_buffers += 1
            self._copy(self._queues[False].popleft())

    def _acquire(self, chunk: _Chunk) -> bool:
        if not self._free and len(self._buffers) < self._ring_size(chunk):
            self._buffers.append(self._allocate(plan_length(chunk.plan)))
            self._free.append(len(self._buffers) - 1)
        if not self._free:
            return False
        chunk.buffer = self._free.pop()
        if self._buffers[chunk.buffer].numel() < plan_length(chunk.plan):
            self._buffers[chunk.buffer] = self._allocate(plan_length(chunk.plan))
        return True

    def _ring_size(self, chunk: _Chunk) -> int:
        return max(4, STAGING_BYTES // plan_length(chunk.plan))

    def _allocate(self, length: int) -> torch.Tensor:
        """A host buffer, pinned where the accelerator wants it, aligned for direct I/O, known to the devices.

        Of the memory that the devices' servers share, as long as there is some: then they need no copy of their own.
        """
        memory = self.engine.memory
        if memory is not None and memory.left >= length:
            raw = (ctypes.c_int8 * length).from_address(memory.take(length))
            buffer = torch.frombuffer(raw, dtype=torch.int8)
        else:
            padded = torch.empty(length + 4096, dtype=torch.int8, pin_memory=self._device.type != "cpu")
            buffer = padded[-padded.data_ptr() % 4096 :][:length]
        self.engine.register(buffer.data_ptr(), length)
        return buffer

    def _to_devices(self, chunk: _Chunk) -> None:
        self._next += 1
        self._at_devices[self._next] = chunk
        chunk.sent = time.monotonic() - chunk.job.started
        memory = [(self._buffers[chunk.buffer].data_ptr(), plan_length(chunk.plan))]
        if isinstance(chunk.plan, LoadPlan):
            self.engine.submit_load(self._next, [(chunk.plan, memory)], patience=chunk.job.time_left)
        else:
            self.engine.submit_store(self._next, [(chunk.plan, memory)])

    def _copy(self, chunk: _Chunk) -> None:
        """Start the copies between the chunk's buffer and its pages."""
        buffer, offset = self._buffers[chunk.buffer], 0
        with self._module.stream(self._streams[chunk.job.is_load]):
            for page, length in self.layout.views(chunk.group, chunk.blocks):
                host = buffer[offset : offset + length]
                offset += length
                if page is not None and chunk.job.is_load:
                    page.copy_(host, non_blocking=True)
                elif page is not None:
                    host.copy_(page, non_blocking=True)
            chunk.event = self._module.Event()
            chunk.event.record(self._streams[chunk.job.is_load])
        self._copying.append(chunk)

    def _arrived(self, chunk: _Chunk, result: TransferResult) -> None:
        """The devices are done with the chunk's buffer."""
        job = chunk.job
        job.result.checksums.update(result.checksums)
        job.result.late |= result.late
        job.result.bytes += result.bytes
        for name, count in result.device_bytes.items():
            job.result.device_bytes[name] = job.result.device_bytes.get(name, 0) + count
        for name, seconds in result.device_seconds.items():
            job.result.device_seconds[name] = max(job.result.device_seconds.get(name, 0.0), chunk.sent + seconds)
        if result.failed or not job.is_load:
            self._end(chunk, result.failed.get(chunk.plan.key, ""))
        else:
            self._copy(chunk)

    def _copied(self, chunk: _Chunk) -> None:
        if chunk.job.is_load:
            self._end(chunk, "")
        else:
            self._to_devices(chunk)

    def _end(self, chunk: _Chunk, failure: str) -> None:
        job = chunk.job
        if failure:
            job.result.failed[chunk.plan.key] = failure
        if chunk.buffer >= 0:
            self._free.append(chunk.buffer)
            self._stores_in_buffers -= not job.is_load
        if job.leave():
            self._finish(job)

    def _finish(self, job: _Job) -> None:
        self._jobs.pop(job.result.transfer, None)
        job.result.seconds = time.monotonic() - job.started
        self._ended.append(job.result)


def _pin(memory: HostMemory) -> None:
    """Have CUDA copy from and to it at full speed and beside other work."""
    error = torch.cuda.cudart().cudaHostRegister(memory.address, memory.size, 0)
    if int(error):
        logger.warning(
            "CUDA does not pin the memory that is shared with SPDK (%s); copies to the GPU are slower", error
        )
