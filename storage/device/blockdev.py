"""Raw block devices: how large they are, and whether anything would be lost by taking them."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
from pathlib import Path

from forebay.storage.errors import DeviceError

_BLKGETSIZE64 = 0x80081272
HEAD = 68 << 10
"""Bytes at the beginning of a device within which all signatures lie."""

_SIGNATURES = (
    (510, b"\x55\xaa", "an MBR partition table or a FAT or NTFS filesystem"),
    (512, b"EFI PART", "a GPT partition table"),
    (4096, b"EFI PART", "a GPT partition table"),
    (1080, b"\x53\xef", "an ext2, ext3 or ext4 filesystem"),
    (0, b"XFSB", "an XFS filesystem"),
    (65600, b"_BHRfS_M", "a btrfs filesystem"),
    (1024, b"\x10\x20\xf5\xf2", "an F2FS filesystem"),
    (4120, bytes.fromhex("c68573f64e1a45ca8265f57f48ba6d81"), "a bcachefs or bcache device"),
    (32769, b"CD001", "an ISO 9660 filesystem"),
    (0, b"hsqs", "a squashfs filesystem"),
    (0, b"LUKS\xba\xbe", "a LUKS volume"),
    (512, b"LABELONE", "an LVM volume"),
    (4096, b"\xfc\x4e\x2b\xa9", "a RAID member"),
    (4086, b"SWAPSPACE2", "swap space"),
)


def is_block_device(fd: int) -> bool:
    """Whether `fd` is a block device (and not a regular file)."""
    return stat.S_ISBLK(os.fstat(fd).st_mode)


def device_size(fd: int) -> int:
    """Bytes of a block device."""
    size: int = struct.unpack("Q", fcntl.ioctl(fd, _BLKGETSIZE64, bytes(8)))[0]
    return size


def largest_request(fd: int) -> int | None:
    """Bytes that the disk below a file, or the block device itself, takes in one request; None when nobody tells."""
    status = os.fstat(fd)
    number = status.st_rdev if stat.S_ISBLK(status.st_mode) else status.st_dev
    disk = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    for queue in (disk / "queue", disk / "../queue"):  # a partition's is its disk's
        try:
            return int((queue / "max_sectors_kb").read_text()) << 10
        except (OSError, ValueError):
            continue
    return None


def refuse_in_use(device: str, path: Path, fd: int) -> None:
    """Refuse a block device that is mounted, swapped on, part of a RAID, or partitioned.

    Raises:
        DeviceError: the kernel says that somebody holds it.
    """
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_EXCL | os.O_CLOEXEC))
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        raise DeviceError(
            device, f"{path} is in use (mounted, swap or RAID)", "free it, or give another path"
        ) from None
    number = os.fstat(fd).st_rdev
    partitions = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").glob("*/partition")
    if found := sorted(partition.parent.name for partition in partitions):
        raise DeviceError(device, f"{path} has partitions ({', '.join(found)})", "give one of them, or remove them")


def refuse_foreign(device: str, path: Path, fd: int) -> None:
    """Refuse a block device that carries a filesystem, a partition table or the like.

    Raises:
        DeviceError: a known signature was found.
    """
    found = foreign(os.pread(fd, HEAD, 0), os.pread(fd, 512, max(0, device_size(fd) - 512)))
    if found:
        raise DeviceError(
            device, f"{path} contains {found}", f"run `wipefs -a {path}` if it may be lost, or give another path"
        )


def foreign(head: bytes, tail: bytes) -> str | None:
    """What a device carries that is not ours, judged by its first `HEAD` and its last 512 bytes."""
    found = [what for offset, magic, what in _SIGNATURES if head[offset : offset + len(magic)] == magic]
    if tail.startswith(b"EFI PART"):
        found.append("the backup of a GPT partition table")
    return found[0] if found else None
