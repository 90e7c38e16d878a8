"""Collapsing memory onto huge pages: the content stays, and nothing that the kernel says is an error."""

from __future__ import annotations

import ctypes
import mmap

import pytest

from forebay.storage.huge_pages import HUGE_PAGE, collapse


def address_of(region: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(region))


@pytest.mark.parametrize("flags", [mmap.MAP_PRIVATE, mmap.MAP_SHARED])
def test_content_stays(flags: int) -> None:
    region = mmap.mmap(-1, 5 * HUGE_PAGE, flags=flags | mmap.MAP_ANONYMOUS)
    content = bytes(range(256)) * (len(region) // 256)
    region[:] = content
    done = collapse(address_of(region), len(region))
    assert region[:] == content
    assert done % HUGE_PAGE == 0
    assert done <= len(region)


def test_less_than_a_huge_page_is_left_alone() -> None:
    region = mmap.mmap(-1, HUGE_PAGE // 2)
    assert collapse(address_of(region), len(region)) == 0


def test_time_is_bounded() -> None:
    region = mmap.mmap(-1, 256 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    region.write(bytes(200 << 20))
    assert collapse(address_of(region), len(region), seconds=0.0) <= 64 << 20


def test_memory_that_is_not_there_is_no_error() -> None:
    assert collapse(HUGE_PAGE, 4 * HUGE_PAGE) == 0
