"""The memory of a chunk: which pages of the KV tensors it is made of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec


class ChunkLayout:
    """Turns block ids into the memory of chunks, for every KV-cache group of this worker.

    A chunk's bytes are the pages of its blocks, layer after layer, block after block within a layer.

    Args:
        kv_caches: vLLM's canonical view of the KV tensors.
        group_ids: vLLM's id of each group, in the order of `kv_caches.group_data_refs`.
        blocks_per_chunk: KV blocks in one chunk.
    """

    def __init__(self, kv_caches: CanonicalKVCaches, group_ids: Sequence[int], blocks_per_chunk: int) -> None:
        self.blocks_per_chunk = blocks_per_chunk
        self._position = {group: index for index, group in enumerate(group_ids)}
        self._tensors = [
            [(kv_caches.tensors[ref.tensor_idx].tensor, ref.page_size_bytes) for ref in refs]
            for refs in kv_caches.group_data_refs
        ]
        self._pages = [
            [(tensor.data_ptr(), tensor.stride(0), page) for tensor, page in tensors] for tensors in self._tensors
        ]
        """Per group and layer: address of block 0, bytes from block to block, bytes of a page."""

    def chunk_bytes(self, group: int) -> int:
        """Bytes of a chunk of this group on this rank."""
        return sum(page for _, _, page in self._pages[self._position[group]]) * self.blocks_per_chunk

    def memory(self, group: int, blocks: Sequence[int | None], length: int) -> list[tuple[int, int]]:
        """(address, bytes) pieces of one chunk.

        Args:
            group: vLLM's group id.
            blocks: `blocks_per_chunk` block ids; None where the chunk has a block that is not in memory.
            length: bytes of the chunk in the pool; what exceeds the pages is padding.
        """
        pieces = [
            (0 if block is None else base + block * stride, page)
            for base, stride, page in self._pages[self._position[group]]
            for block in blocks
        ]
        padding = length - self.chunk_bytes(group)
        return [*pieces, (0, padding)] if padding else pieces

    def views(self, group: int, blocks: Sequence[int | None]) -> Iterator[tuple[torch.Tensor | None, int]]:
        """The pages of a chunk in order: an int8 view of each (None for a block not in memory) and its bytes."""
        for tensor, page in self._tensors[self._position[group]]:
            for block in blocks:
                yield (None if block is None else tensor[block, :page]), page

    def chunks(self, groups: Iterable[int], spec: GPULoadStoreSpec) -> Iterator[list[int | None]]:
        """The block ids of each chunk, for chunks listed group by group as `spec` lists their blocks.

        vLLM names a group's blocks in one run; `block_indices` says where in its first chunk the run begins.
        """
        streams: dict[int, Iterator[list[int | None]]] = {}
        starts = [0]
        for size in spec.group_sizes:
            starts.append(starts[-1] + size)
        for group in groups:
            index = self._position[group]
            if index not in streams:
                run = [int(block) for block in spec.block_ids[starts[index] : starts[index + 1]]]
                streams[index] = self._split(run, spec.block_indices[index] % self.blocks_per_chunk)
            yield next(streams[index])

    def _split(self, run: Sequence[int], skip: int) -> Iterator[list[int | None]]:
        blocks: list[int | None] = [None] * skip + list(run)
        while True:
            chunk, blocks = blocks[: self.blocks_per_chunk], blocks[self.blocks_per_chunk :]
            yield chunk + [None] * (self.blocks_per_chunk - len(chunk))
