"""One request to an SPDK target, through the JSON-RPC client of the `spdk` package.

That client counts CPU time against its time-out, decodes every 4096 bytes by themselves, does not compare ids, adds a
logging handler each time it is made and is not thread-safe. So it gets a connection of its own for every call, over a
socket of ours that bounds the wall-clock time and the size of an answer and hands answers over whole.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forebay.storage.errors import ForebayError
from forebay.storage.spdk import fixes
from forebay.storage.units import format_bytes

DEFAULT_SOCKET = Path("/var/tmp/spdk.sock")
"""Where SPDK's applications listen unless told otherwise."""
SECONDS = 30.0
"""Longest wait for one answer (our choice: attaching a drive takes a few seconds)."""
LARGEST = 64 << 20
"""Longest answer that is read (bytes, our choice: SPDK itself stops at 32 MiB)."""
SHOWN = 60
"""Bytes of an odd answer that an error quotes."""


@dataclass(frozen=True, slots=True)
class Rpc:
    """A method of the target and its parameters."""

    method: str
    params: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.method} {json.dumps(dict(self.params))}" if self.params else self.method


class SpdkError(ForebayError):
    """A request failed; the message names the target, the RPC with its parameters, the reason and the fix."""

    def __init__(self, address: Path, rpc: Rpc, problem: str, fix: str = "", code: int | None = None) -> None:
        self.rpc = rpc
        self.code = code
        """The target's error code; None when it gave no answer, so that nobody knows whether it did what was asked."""
        super().__init__(f"SPDK at {address}: {rpc}: {problem}" + (f"; {fix}" if fix else ""))


def call(address: Path, rpc: Rpc, seconds: float = SECONDS) -> Any:
    """Send `rpc` to the target that listens at `address` and return its result.

    Raises:
        SpdkError: no target, no permission, no answer in `seconds`, a refusal, or an answer that is none.
    """
    with contextlib.closing(_Guarded(address, rpc, seconds)) as guarded:
        client = _client(address, rpc, guarded)
        number = client.send(rpc.method, dict(rpc.params))
        answer = client.recv()
    if "error" in answer:
        raise _refusal(address, rpc, answer["error"])
    if answer.get("id") != number or "result" not in answer:
        raise SpdkError(address, rpc, f"answered {_quote(json.dumps(answer).encode())}, which is no answer to this")
    return answer["result"]


def _client(address: Path, rpc: Rpc, guarded: _Guarded) -> Any:
    """The package's client, made to speak through `guarded`."""
    try:
        from spdk.rpc.client import JSONRPCClient
    except ImportError:
        raise SpdkError(
            address, rpc, "the Python package `spdk` is missing", 'install it: pip install "forebay[spdk]"'
        ) from None

    class Client(JSONRPCClient):  # type: ignore[misc]  # the package has no types
        def _connect(self, *_: object) -> None:
            self.sock = guarded

    client = Client(str(address))
    logging.getLogger(f"JSONRPCClient({address})").handlers.clear()
    if client.sock is not guarded:
        raise SpdkError(address, rpc, "this release of the `spdk` package is not supported", 'pip install "spdk==26.9"')
    return client


def _refusal(address: Path, rpc: Rpc, error: object) -> SpdkError:
    detail = error if isinstance(error, dict) else {}
    code = detail.get("code") if isinstance(detail.get("code"), int) else 0
    message = str(detail.get("message") or "").strip() or "refused without a reason"
    return SpdkError(address, rpc, f"{message} (code {code})", fixes.for_refusal(rpc.method, code or 0, message), code)


class _Guarded:
    """What the client takes for its socket."""

    def __init__(self, address: Path, rpc: Rpc, seconds: float) -> None:
        self._address = address
        self._rpc = rpc
        self._seconds = seconds
        self._end = time.monotonic() + seconds
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._received = bytearray()
        try:
            self._connect()
        except OSError as error:
            self._socket.close()
            raise self._unreachable(error) from None
        except SpdkError:
            self._socket.close()
            raise

    def _connect(self) -> None:
        while True:
            self._wait()
            try:
                return self._socket.connect(str(self._address))
            except BlockingIOError:  # many wait already, and the target takes nobody
                time.sleep(0.02)

    def settimeout(self, _: float) -> None:
        """The client's own time-out is not used."""

    def sendall(self, data: bytes) -> None:
        self._wait()
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise self._unreachable(error) from None

    def recv(self, _: int) -> bytes:
        """The whole answer, once it is there."""
        while not self._complete():
            self._wait()
            try:
                data = self._socket.recv(1 << 20)
            except OSError as error:
                raise self._unreachable(error) from None
            if not data:
                raise self._error(f"closed the connection {self._progress()}", "see the target's log")
            self._received += data
        return bytes(self._received)

    def close(self) -> None:
        self._socket.close()

    def _complete(self) -> bool:
        text = bytes(self._received).strip()
        if text and not text.startswith(b"{"):
            raise self._error(f"answered {_quote(text)}, which is not JSON-RPC", fixes.WRONG_SOCKET)
        if len(text) > LARGEST:
            raise self._error(f"the answer is longer than {format_bytes(LARGEST)}", fixes.WRONG_SOCKET)
        if not text.endswith(b"}"):
            return False
        try:
            answer = json.loads(text)
        except RecursionError:
            raise self._error("the answer is nested too deeply", fixes.WRONG_SOCKET) from None
        except ValueError:
            return False
        if not answer:
            raise self._error("answered {}, which is no answer to this", fixes.WRONG_SOCKET)
        return True

    def _wait(self) -> None:
        left = self._end - time.monotonic()
        if left <= 0:
            raise self._unreachable(TimeoutError())
        self._socket.settimeout(left)

    def _unreachable(self, error: OSError) -> SpdkError:
        if isinstance(error, TimeoutError):
            return self._error(f"no answer after {self._seconds:g} s, {self._progress()}", fixes.HUNG)
        if error.errno is None:  # the path is longer than a socket's may be
            return self._error(str(error), "give another --socket")
        return self._error(os.strerror(error.errno), fixes.for_errno(error.errno, self._address))

    def _progress(self) -> str:
        if not self._received:
            return "without an answer"
        return f"after {len(self._received)} bytes that are no whole answer: {_quote(self._received)}"

    def _error(self, problem: str, fix: str) -> SpdkError:
        return SpdkError(self._address, self._rpc, problem, fix)


def _quote(data: bytes | bytearray) -> str:
    text = repr(bytes(data[:SHOWN]))[1:]
    return text + ("..." if len(data) > SHOWN else "")
