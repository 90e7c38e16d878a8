"""A vhost-user-blk target on DPDK's rte_vhost, the library below SPDK's: `python -m ...rte_target SOCKET FILE`.

Like SPDK it serves many connections on one socket, polls (a queue is never kicked) and takes requests of at most 29
segments of 64 KiB. It is slow, and there to be another implementation than QEMU's.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
import threading
import time
from ctypes import CFUNCTYPE, c_char, c_int, c_uint16, c_uint64, c_void_p

LIBRARY = "librte_vhost.so.23"
SEGMENT, SEGMENTS = 64 << 10, 29
FEATURES = 1 << 1 | 1 << 2 | 1 << 6 | 1 << 9 | 1 << 28 | 1 << 30 | 1 << 32
MULTI_QUEUE, REPLY_ACK, CONFIG = 1 << 0, 1 << 3, 1 << 9
GET_CONFIG = 24
REPLY, NOT_HANDLED = 1, 2
OK, IO_ERROR, UNSUPPORTED = 0, 1, 2

NewDevice = CFUNCTYPE(c_int, c_int)
DestroyDevice = CFUNCTYPE(None, c_int)
StateChanged = CFUNCTYPE(c_int, c_int, c_uint16, c_int)
FeaturesChanged = CFUNCTYPE(c_int, c_int, c_uint64)
Handler = CFUNCTYPE(c_int, c_int, c_void_p)


class Operations(ctypes.Structure):
    _fields_ = (
        ("new_device", NewDevice), ("destroy_device", DestroyDevice), ("vring_state_changed", StateChanged),
        ("features_changed", FeaturesChanged), ("new_connection", NewDevice), ("destroy_connection", DestroyDevice),
        ("guest_notified", DestroyDevice), ("reserved", c_void_p),
    )  # fmt: skip


class Extern(ctypes.Structure):
    _fields_ = (("before", Handler), ("after", Handler))


class Region(ctypes.Structure):
    _fields_ = (
        ("guest", c_uint64), ("user", c_uint64), ("host", c_uint64), ("size", c_uint64), ("map", c_void_p),
        ("map_size", c_uint64), ("fd", c_int),
    )  # fmt: skip


class Ring(ctypes.Structure):
    _fields_ = (
        ("descriptors", c_uint64), ("available", c_uint64), ("used", c_uint64), ("log", c_uint64), ("call", c_int),
        ("kick", c_int), ("size", c_uint16),
    )  # fmt: skip


class Target:
    """One file at one socket."""

    def __init__(self, socket: str, path: str) -> None:
        self.file = os.open(path, os.O_RDWR)
        self.size = os.fstat(self.file).st_size
        self.rings: dict[int, tuple[Ring, list[Region], int]] = {}
        """By connection: its queue, the memory it shares, and the next request."""
        self.lock = threading.Lock()
        ctypes.CDLL("librte_eal.so.23", mode=ctypes.RTLD_GLOBAL)
        self.library = ctypes.CDLL(LIBRARY, mode=ctypes.RTLD_GLOBAL)
        self._initialize()
        self._callbacks = Operations(
            new_device=NewDevice(self.begin), destroy_device=DestroyDevice(self.end),
            new_connection=NewDevice(self.connected),
        )  # fmt: skip
        self._extern = Extern(before=Handler(self.message))
        name = socket.encode()
        self._check(self.library.rte_vhost_driver_register(name, c_uint64(0)))
        self._check(self.library.rte_vhost_driver_set_features(name, c_uint64(FEATURES)))
        self._check(
            self.library.rte_vhost_driver_set_protocol_features(name, c_uint64(MULTI_QUEUE | REPLY_ACK | CONFIG))
        )
        self._check(self.library.rte_vhost_driver_callback_register(name, ctypes.byref(self._callbacks)))
        self._check(self.library.rte_vhost_driver_start(name))

    def _initialize(self) -> None:
        words = [b"target", b"--no-huge", b"--no-shconf", b"--no-pci", b"--no-telemetry", b"-m", b"64", b"-l", b"0"]
        arguments = (ctypes.c_char_p * len(words))(*words)
        if ctypes.CDLL("librte_eal.so.23").rte_eal_init(len(words), arguments) < 0:
            sys.exit("rte_eal_init failed")

    def _check(self, result: int) -> None:
        if result:
            sys.exit(f"rte_vhost refused: {result}")

    # ---- called by rte_vhost ----

    def connected(self, connection: int) -> int:
        return int(
            self.library.rte_vhost_extern_callback_register(connection, ctypes.byref(self._extern), c_void_p(None))
        )

    def message(self, connection: int, message: int) -> int:
        """rte_vhost leaves the size of the disk to us."""
        if struct.unpack_from("<I", (c_char * 4).from_address(message))[0] != GET_CONFIG:
            return NOT_HANDLED
        body = struct.pack("<QII", self.size // 512, SEGMENT, SEGMENTS) + bytes(4) + struct.pack("<I", 512)
        ctypes.memmove(message + 12 + 12, body.ljust(60, b"\0"), 60)
        struct.pack_into("<I", (c_char * 4).from_address(message + 8), 0, 12 + 60)
        return REPLY

    def begin(self, connection: int) -> int:
        ring, table, last = Ring(), c_void_p(), (c_uint16 * 2)()
        self._check(self.library.rte_vhost_get_vhost_vring(connection, c_uint16(0), ctypes.byref(ring)))
        self._check(self.library.rte_vhost_get_mem_table(connection, ctypes.byref(table)))
        assert table.value is not None
        count = ctypes.c_uint32.from_address(table.value).value
        regions = [Region.from_address(table.value + 8 + number * ctypes.sizeof(Region)) for number in range(count)]
        self.library.rte_vhost_get_vring_base(
            connection, c_uint16(0), ctypes.byref(last), ctypes.byref(last, ctypes.sizeof(c_uint16))
        )
        self.library.rte_vhost_enable_guest_notification(connection, c_uint16(0), 0)
        with self.lock:
            self.rings[connection] = (ring, regions, last[0])
        return 0

    def end(self, connection: int) -> None:
        with self.lock:
            _, _, seen = self.rings.pop(connection)
            self.library.rte_vhost_set_vring_base(connection, c_uint16(0), c_uint16(seen), c_uint16(seen))

    # ---- the queue ----

    def run(self) -> None:
        while True:
            with self.lock:
                busy = [self.poll(connection) for connection in self.rings]
            if not any(busy):
                time.sleep(0.0005)

    def poll(self, connection: int) -> bool:
        ring, regions, seen = self.rings[connection]
        available = c_uint16.from_address(ring.available + 2).value
        if available == seen:
            return False
        while seen != available:
            head = c_uint16.from_address(ring.available + 4 + 2 * (seen % ring.size)).value
            self.serve(ring, regions, head)
            entry = ring.used + 4 + 8 * (seen % ring.size)
            struct.pack_into("<II", (c_char * 8).from_address(entry), 0, head, 0)
            seen = (seen + 1) % 65536
        self.rings[connection] = (ring, regions, seen)
        c_uint16.from_address(ring.used + 2).value = seen
        self.library.rte_vhost_vring_call(connection, c_uint16(0))
        return True

    def serve(self, ring: Ring, regions: list[Region], head: int) -> None:
        address, length, flags, _ = struct.unpack("<QIHH", ctypes.string_at(ring.descriptors + 16 * head, 16))
        assert flags == 4, "an indirect table and nothing else"
        table = ctypes.string_at(translate(regions, address, length), length)
        (first, header, _, _), *data, (last, one, _, _) = struct.iter_unpack("<QIHH", table)
        assert (header, one) == (16, 1), "SPDK insists on these lengths"
        assert len(data) <= SEGMENTS
        assert all(size <= SEGMENT for _, size, _, _ in data)
        kind, _, sector = struct.unpack("<IIQ", ctypes.string_at(translate(regions, first, 16), 16))
        pieces = [(c_char * size).from_address(translate(regions, at, size)) for at, size, _, _ in data]
        ctypes.c_uint8.from_address(translate(regions, last, 1)).value = self.move(kind, pieces, 512 * sector)

    def move(self, kind: int, pieces: list[ctypes.Array[c_char]], offset: int) -> int:
        total = sum(map(len, pieces))
        if offset + total > self.size or total % 512:
            return IO_ERROR
        if kind == 0:
            return OK if os.preadv(self.file, pieces, offset) == total else IO_ERROR
        if kind == 1:
            return OK if os.pwritev(self.file, pieces, offset) == total else IO_ERROR
        if kind == 4:
            os.fdatasync(self.file)
            return OK
        return UNSUPPORTED


def translate(regions: list[Region], address: int, size: int) -> int:
    """Where memory of the client is mapped here; it must lie in one region."""
    for region in regions:
        if region.guest <= address and address + size <= region.guest + region.size:
            return int(region.host + address - region.guest)
    raise AssertionError(f"{address:#x} of {size} bytes is not shared")


if __name__ == "__main__":
    Target(*sys.argv[1:]).run()
