"""Talking a vhost-user-blk server into serving a queue in our memory: the front end's side of the handshake.

As QEMU's specification of vhost-user has it. SPDK's `vhost_create_blk_controller`, QEMU's storage daemon and DPDK's
rte_vhost are such servers. Addresses that the server sees are ours: memory is announced under the addresses at which
it is mapped here.
"""

from __future__ import annotations

import enum
import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from forebay.storage.errors import DeviceError

TIMEOUT = 5.0
"""Seconds for an answer: a server that is there answers at once, one that serves another client not at all."""
_HEADER = struct.Struct("<III")
_VERSION, _REPLY, _NEED_REPLY = 1, 4, 8
_CONFIG_BYTES = 60
_QUEUE = 0


class _Request(enum.IntEnum):
    GET_FEATURES = 1
    SET_FEATURES = 2
    SET_OWNER = 3
    SET_MEM_TABLE = 5
    SET_VRING_NUM = 8
    SET_VRING_ADDR = 9
    SET_VRING_BASE = 10
    GET_VRING_BASE = 11
    SET_VRING_KICK = 12
    SET_VRING_CALL = 13
    GET_PROTOCOL_FEATURES = 15
    SET_PROTOCOL_FEATURES = 16
    SET_VRING_ENABLE = 18
    GET_CONFIG = 24


class _Feature(enum.IntFlag):
    SIZE_MAX = 1 << 1
    SEG_MAX = 1 << 2
    READ_ONLY = 1 << 5
    BLOCK_SIZE = 1 << 6
    FLUSH = 1 << 9
    INDIRECT = 1 << 28
    PROTOCOL = 1 << 30
    VERSION_1 = 1 << 32


_NEEDED = _Feature.INDIRECT | _Feature.PROTOCOL | _Feature.VERSION_1
_WANTED = _NEEDED | _Feature.SIZE_MAX | _Feature.SEG_MAX | _Feature.READ_ONLY | _Feature.BLOCK_SIZE | _Feature.FLUSH


class _Protocol(enum.IntFlag):
    REPLY_ACK = 1 << 3
    CONFIG = 1 << 9


@dataclass(frozen=True, slots=True)
class Disk:
    """What a server says about its disk."""

    capacity: int
    """Bytes."""
    block: int
    """Bytes that are read and written as a whole."""
    segment: int
    """Longest part of a request (bytes)."""
    segments: int
    """Most parts of a request."""
    flush: bool
    """Whether writes must be flushed to be durable."""
    read_only: bool


class Connection:
    """A connection to a server, closed when the server is to stop.

    Args:
        device: name of the device, for errors.
        path: the server's socket.

    Raises:
        DeviceError: no server is there, or it is busy or not of this kind.
    """

    def __init__(self, device: str, path: Path) -> None:
        self._device, self._path = device, path
        self._acknowledges = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(TIMEOUT)
        try:
            self._socket.connect(str(path))
            self.disk = self._agree()
        except (OSError, DeviceError) as error:
            self._socket.close()
            raise error if isinstance(error, DeviceError) else self._failure(error) from None

    def fileno(self) -> int:
        """Readable when the server is gone."""
        return self._socket.fileno()

    def share(self, fd: int, address: int, size: int) -> None:
        """Let the server reach memory: `size` bytes of `fd`, mapped at `address` here.

        Raises:
            DeviceError: it refuses.
        """
        self._set(_Request.SET_MEM_TABLE, struct.pack("<IIQQQQ", 1, 0, address, size, address, 0), fd)

    def start(self, queue: tuple[int, int, int, int], kick: int, call: int) -> None:
        """Serve a queue.

        Args:
            queue: its size and the addresses of descriptors, used ring and available ring.
            kick: eventfd that tells the server of new requests.
            call: eventfd that it tells us of finished ones.

        Raises:
            DeviceError: it refuses.
        """
        size, descriptors, used, available = queue
        self._set(_Request.SET_VRING_NUM, struct.pack("<II", _QUEUE, size))
        self._set(_Request.SET_VRING_BASE, struct.pack("<II", _QUEUE, 0))
        self._set(_Request.SET_VRING_ADDR, struct.pack("<IIQQQQ", _QUEUE, 0, descriptors, used, available, 0))
        self._set(_Request.SET_VRING_CALL, struct.pack("<Q", _QUEUE), call)
        self._set(_Request.SET_VRING_KICK, struct.pack("<Q", _QUEUE), kick)
        self._set(_Request.SET_VRING_ENABLE, struct.pack("<II", _QUEUE, 1))

    def gone(self) -> bool:
        """Whether the server has closed the connection; what else it sends is thrown away."""
        self._socket.setblocking(False)
        try:
            return not self._socket.recv(4096)
        except BlockingIOError:
            return False
        except OSError:
            return True
        finally:
            self._socket.settimeout(TIMEOUT)

    def stop(self) -> None:
        """Have the server finish what it is working on and leave the queue alone; it can be started again.

        Raises:
            DeviceError: it does not answer.
        """
        try:
            self._get(_Request.GET_VRING_BASE, struct.pack("<II", _QUEUE, 0))
        except OSError as error:
            raise self._failure(error) from None

    def close(self) -> None:
        """Leave."""
        self._socket.close()

    def _agree(self) -> Disk:
        offered = self._get_u64(_Request.GET_FEATURES)
        if missing := _NEEDED & ~_Feature(offered & _WANTED):
            raise self._error(f"its server does not offer {missing.name}", "use SPDK, or QEMU's storage daemon")
        self._set(_Request.SET_OWNER)
        protocol = self._get_u64(_Request.GET_PROTOCOL_FEATURES)
        if not protocol & _Protocol.CONFIG:
            raise self._error("its server does not tell the size of its disk", "use SPDK, or QEMU's storage daemon")
        chosen = protocol & (_Protocol.CONFIG | _Protocol.REPLY_ACK)
        self._set(_Request.SET_PROTOCOL_FEATURES, struct.pack("<Q", chosen))
        self._acknowledges = bool(chosen & _Protocol.REPLY_ACK)
        features = _Feature(offered & _WANTED)
        self._set(_Request.SET_FEATURES, struct.pack("<Q", features))
        return self._disk(features)

    def _disk(self, features: _Feature) -> Disk:
        reply = self._get(_Request.GET_CONFIG, struct.pack("<III", 0, _CONFIG_BYTES, 0) + bytes(_CONFIG_BYTES))
        if len(reply) < 12 + 24:
            raise self._error(f"its server tells {len(reply)} bytes about its disk", "check that it is a block device")
        sectors, size_max, seg_max = struct.unpack_from("<QII", reply, 12)
        (block,) = struct.unpack_from("<I", reply, 12 + 20)
        if not features & _Feature.BLOCK_SIZE or block < 512 or block & (block - 1):
            block = 512
        return Disk(
            capacity=sectors * 512,
            block=block,
            segment=size_max if features & _Feature.SIZE_MAX and size_max else 1 << 20,
            segments=seg_max if features & _Feature.SEG_MAX and seg_max else 1,
            flush=bool(features & _Feature.FLUSH),
            read_only=bool(features & _Feature.READ_ONLY),
        )

    def _set(self, request: _Request, payload: bytes = b"", fd: int | None = None) -> None:
        """Raises OSError, too, as long as the connection is being made."""
        self._send(request, payload, fd, _NEED_REPLY if self._acknowledges else 0)
        if self._acknowledges and (result := struct.unpack("<Q", self._receive(request))[0]):
            raise self._error(f"its server refuses {request.name} ({result})", "see the server's log")

    def _get(self, request: _Request, payload: bytes = b"") -> bytes:
        self._send(request, payload, None, 0)
        return self._receive(request)

    def _get_u64(self, request: _Request) -> int:
        reply = self._get(request)
        if len(reply) != 8:
            raise self._error(
                f"its server answers {request.name} with {len(reply)} bytes", "check that it is vhost-user"
            )
        value: int = struct.unpack("<Q", reply)[0]
        return value

    def _send(self, request: _Request, payload: bytes, fd: int | None, flags: int) -> None:
        message = _HEADER.pack(request, _VERSION | flags, len(payload)) + payload
        fds = [] if fd is None else [fd]
        sent = socket.send_fds(self._socket, [message], fds)
        if sent < len(message):
            self._socket.sendall(message[sent:])

    def _receive(self, request: _Request) -> bytes:
        number, flags, size = _HEADER.unpack(self._read(_HEADER.size))
        if number != request or not flags & _REPLY or size > 4096:
            raise self._error(f"its server answers {request.name} with message {number}", "is it vhost-user?")
        return self._read(size)

    def _read(self, size: int) -> bytes:
        found = b""
        while len(found) < size:
            part = self._socket.recv(size - len(found))
            if not part:
                raise self._error("its server closes the connection", "see the server's log")
            found += part
        return found

    def _failure(self, error: OSError) -> DeviceError:
        if isinstance(error, TimeoutError):
            return self._error(
                f"its server does not answer within {TIMEOUT:g} s",
                "check that it runs and that no other process uses this socket",
            )
        fix = "run `forebay spdk attach`, or correct the path"
        if isinstance(error, PermissionError):
            fix = "give this user read and write permission"
        return self._error(f"cannot connect ({error.strerror or error})", fix)

    def _error(self, what: str, fix: str) -> DeviceError:
        return DeviceError(self._device, f"{self._path}: {what}", fix)


def eventfds() -> tuple[int, int]:
    """Two that do not block: for kicks and for calls."""
    return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK), os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
