"""The first 4 KiB of a file or block device: whose it is."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from forebay.storage.config import BLOCK
from forebay.storage.device._native import crc32c
from forebay.storage.errors import DeviceError

SIZE = BLOCK
"""Bytes; offset 0 of the device follows."""

MAGIC = b"FOREBAY\n"
VERSION = 1
_FORMAT = struct.Struct("<8sII16s64sQ")
_CHECKSUM = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Superblock:
    """What is written at the start of a file or block device."""

    pool_uuid: bytes
    name: str
    capacity: int
    """Bytes of the device, without the superblock."""

    def pack(self) -> bytes:
        """The 4 KiB to write."""
        head = _FORMAT.pack(MAGIC, VERSION, 0, self.pool_uuid, self.name.encode(), self.capacity)
        return (head + _CHECKSUM.pack(crc32c(head))).ljust(SIZE, b"\0")


def is_ours(block: bytes) -> bool:
    """Whether the block is a superblock of forebay, of whatever version or state."""
    return block[: len(MAGIC)] == MAGIC


def unpack(block: bytes, device: str, path: str) -> Superblock:
    """Read a superblock.

    Raises:
        DeviceError: not one of ours, of another format version, or damaged.
    """
    if len(block) < SIZE or not is_ours(block):
        raise DeviceError(device, f"{path} is not a forebay device", "give another path, or run `forebay pool create`")
    _, version, _, pool_uuid, name, capacity = _FORMAT.unpack_from(block)
    if version != VERSION:
        raise DeviceError(device, f"{path} has format version {version}, this release reads {VERSION}", remedy(path))
    if crc32c(block[: _FORMAT.size]) != _CHECKSUM.unpack_from(block, _FORMAT.size)[0]:
        raise DeviceError(device, f"the superblock of {path} is damaged", remedy(path))
    return Superblock(pool_uuid, name.rstrip(b"\0").decode(), capacity)


def remedy(path: str) -> str:
    """How to give up what is on the device."""
    if path.startswith("/dev/"):
        return f"to discard its content run `dd if=/dev/zero of={path} bs=4096 count=1`"
    return f"to discard its content delete {path}"
