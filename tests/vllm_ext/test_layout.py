"""The memory of a chunk, checked against plain tensor indexing."""

from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor, GPULoadStoreSpec

from forebay.vllm_ext.layout import ChunkLayout

BLOCKS, PAGE, STRIDE = 12, 40, 64


def caches(groups: list[int]) -> CanonicalKVCaches:
    """`groups[g]` layers in group g, each layer a tensor of its own, pages shorter than the block stride."""
    tensors, refs = [], []
    for layers in groups:
        first = len(tensors)
        for _ in range(layers):
            data = torch.randint(-128, 128, (BLOCKS, STRIDE), dtype=torch.int8)
            tensors.append(CanonicalKVCacheTensor(data[:, :PAGE], PAGE))
        refs.append([CanonicalKVCacheRef(index, PAGE) for index in range(first, len(tensors))])
    return CanonicalKVCaches(tensors, refs)


def read(pieces: list[tuple[int, int]]) -> bytes:
    return b"".join(ctypes.string_at(address, length) if address else b"\0" * length for address, length in pieces)


def expected(kv: CanonicalKVCaches, group: int, blocks: list[int | None], padding: int) -> bytes:
    pages = []
    for ref in kv.group_data_refs[group]:
        for block in blocks:
            tensor = kv.tensors[ref.tensor_idx].tensor
            pages.append(b"\0" * PAGE if block is None else tensor[block].numpy().tobytes())
    return b"".join(pages) + b"\0" * padding


@given(
    st.lists(st.one_of(st.none(), st.integers(0, BLOCKS - 1)), min_size=3, max_size=3),
    st.integers(0, 1),
    st.integers(0, 100),
)
def test_memory_is_the_pages_in_order(blocks: list[int | None], group: int, padding: int) -> None:
    kv = caches([2, 3])
    layout = ChunkLayout(kv, [0, 5], blocks_per_chunk=3)
    group_id = [0, 5][group]
    length = layout.chunk_bytes(group_id) + padding
    assert read(layout.memory(group_id, blocks, length)) == expected(kv, group, blocks, padding)
    views = b"".join(
        b"\0" * length if view is None else view.numpy().tobytes() for view, length in layout.views(group_id, blocks)
    )
    assert views == expected(kv, group, blocks, 0)


@pytest.mark.parametrize(
    ("start", "run", "chunks"),
    [
        (0, [1, 2, 3, 4], [[1, 2], [3, 4]]),
        (3, [1, 2, 3], [[None, 1], [2, 3]]),
        (4, [1, 2, 3], [[1, 2], [3, None]]),
        (1, [7], [[None, 7]]),
    ],
)
def test_chunks_follow_vllms_runs(start: int, run: list[int], chunks: list[list[int | None]]) -> None:
    layout = ChunkLayout(caches([1, 1]), [0, 1], blocks_per_chunk=2)
    spec = GPULoadStoreSpec([*run, 9, 9], group_sizes=[len(run), 2], block_indices=[start, 0])
    assert list(layout.chunks([0] * len(chunks) + [1], spec)) == [*chunks, [9, 9]]
