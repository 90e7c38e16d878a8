"""The front end of vhost-user against servers that lie, stall or leave, and a ring in which nonsense appears."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.storage.device import vhost_user
from forebay.storage.device._native import Queue, virtqueue
from forebay.storage.device.vhost_user import Connection, eventfds
from forebay.storage.errors import DeviceError

MIB = 1 << 20


@contextmanager
def server(answer: Callable[[bytes], bytes | None]) -> Iterator[Path]:
    """Answers every message with bytes of its own; None closes."""
    with TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        path = Path(folder) / "socket"
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            client, _ = listener.accept()
            with client, contextlib.suppress(ConnectionError):
                while message := client.recv(4096):
                    reply = answer(message)
                    if reply is None:
                        return
                    client.sendall(reply)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield path
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(5)


def reply(message: bytes, payload: bytes) -> bytes:
    return struct.pack("<III", struct.unpack_from("<I", message)[0], 1 | 4, len(payload)) + payload


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vhost_user, "TIMEOUT", 0.3)


@settings(max_examples=60, deadline=None)
@given(st.binary(min_size=1, max_size=200))
def test_any_answer_is_an_error_in_one_line(data: bytes) -> None:
    with server(lambda message: data) as path, pytest.raises(DeviceError, match=r"^device 'd': .*; .*$"):
        Connection("d", path)


@settings(max_examples=40, deadline=None)
@given(features=st.integers(0, 2**64 - 1), protocol=st.integers(0, 2**64 - 1), config=st.binary(max_size=80))
def test_any_well_formed_answer(features: int, protocol: int, config: bytes) -> None:
    """Either it is refused, or what the disk says about itself can be used."""
    bodies = {
        1: struct.pack("<Q", features | 1 << 30 | 1 << 32 | 1 << 28), 15: struct.pack("<Q", protocol | 1 << 9),
        24: bytes(12) + config,
    }  # fmt: skip

    def answer(message: bytes) -> bytes:
        number, flags = struct.unpack_from("<II", message)
        return reply(message, bodies[number]) if number in bodies else reply(message, bytes(8)) if flags & 8 else b""

    with server(answer) as path:
        try:
            connection = Connection("d", path)
        except DeviceError:
            assert len(config) < 24
            return
        with closing(connection):
            disk = connection.disk
            assert disk.block >= 512
            assert disk.block & (disk.block - 1) == 0
            assert disk.segment > 0
            assert disk.segments > 0


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (lambda message: None, "closes the connection"),
        (lambda message: b"", "does not answer within"),
        (lambda message: reply(message, bytes(8)), "does not offer"),
        (lambda message: reply(message, b"\xff" * 4), "answers GET_FEATURES with 4 bytes"),
        (lambda message: struct.pack("<III", 77, 5, 8) + bytes(8), "answers GET_FEATURES with message 77"),
        (lambda message: struct.pack("<III", 1, 5, 1 << 30), "answers GET_FEATURES with message 1"),
    ],
)
def test_servers_of_other_kinds(answer: Callable[[bytes], bytes | None], problem: str) -> None:
    with server(answer) as path, pytest.raises(DeviceError, match=problem):
        Connection("d", path)


# ---- the ring ----


class Ring:
    """A queue without a server: the test writes what a device would."""

    def __init__(self) -> None:
        self.memory = ctypes.create_string_buffer(8 * MIB)
        self.base = -(-ctypes.addressof(self.memory) // 4096) * 4096
        self.size, _, self.used, self.available, _ = virtqueue(self.base, 4)
        self.queue = Queue(
            "vhost", "kv-x", MIB, 4, offset_alignment=512, length_alignment=512, memory_alignment=512,
            shared=(self.base, 6 * MIB), ring=self.base, arena=self.base + MIB, slot=MIB, segments=(8, 65536),
        )  # fmt: skip
        self.kick, self.call = eventfds()
        self.queue.attach(self.kick, self.call)
        self.target = ctypes.create_string_buffer(4096)

    def read(self, tag: int) -> None:
        self.queue.submit([(tag, 0, 0, 4096, [(ctypes.addressof(self.target), 4096)], False)])
        self.wait(lambda: self.word(self.available, 1) > 0)

    def word(self, address: int, number: int) -> int:
        return ctypes.c_uint16.from_address(address + 2 * number).value

    def finish(self, place: int, *, ahead: int = 1) -> None:
        """The device says that it is done with a place."""
        index = self.word(self.used, 1)
        struct.pack_into("<II", (ctypes.c_char * 8).from_address(self.used + 4 + 8 * (index % self.size)), 0, place, 0)
        ctypes.c_uint16.from_address(self.used + 2).value = (index + ahead) % 65536
        os.eventfd_write(self.call, 1)

    def wait(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.001)

    def results(self, count: int) -> list[int]:
        found: list[int] = []
        self.wait(lambda: bool(found.extend(one[1] for one in self.queue.poll()) or len(found) >= count))
        return found


@pytest.fixture
def ring() -> Iterator[Ring]:
    made = Ring()
    yield made
    assert made.queue.close()


@pytest.mark.parametrize(("place", "ahead"), [(3, 1), (4, 1), (5, 1), (7, 1), (8, 1), (2**32 - 1, 1), (0, 9)])
def test_nonsense_in_the_used_ring_ends_the_connection(ring: Ring, place: int, ahead: int) -> None:
    ring.read(1)
    ring.finish(place, ahead=ahead)
    assert ring.results(1) == [-errno.EPROTO]
    ring.queue.submit([(2, 0, 0, 4096, [(ctypes.addressof(ring.target), 4096)], False)])
    assert ring.results(1) == [-errno.ENOTCONN]
    ring.queue.attach(ring.kick, ring.call)
    ring.read(3)


def test_a_signal_without_news_and_a_request_without_an_answer(ring: Ring) -> None:
    """Spurious signals change nothing; a status that was never written is an error."""
    for _ in range(5):
        os.eventfd_write(ring.call, 1)
    ring.read(1)
    time.sleep(0.05)
    assert ring.queue.poll() == []
    ring.finish(0)
    assert ring.results(1) == [-errno.EIO]


def test_ordered_without_a_device(ring: Ring) -> None:
    ring.queue.detach()
    ring.queue.detach()
    with pytest.raises(OSError, match="not connected"):
        ring.queue.flush()
    with pytest.raises(OSError, match="Bad file descriptor"):
        ring.queue.attach(-1, ring.call)
