"""One request: what comes back, and that no server can make us wait, crash or guess."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.storage.spdk.rpc import Rpc, SpdkError, call
from tests.storage.spdk.standin import Refused

VERSION = Rpc("spdk_get_version")


@contextlib.contextmanager
def server(path: Path, behave):
    """Accepts connections one after another; `behave` gets each."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def serve():
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection, contextlib.suppress(OSError):
                    behave(connection)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield path
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)


def answering(data: bytes):
    def behave(connection):
        connection.recv(65536)
        connection.sendall(data)
        connection.recv(1)  # until the client has gone

    return behave


def outcome(tmp_path, behave, seconds=5.0, rpc=VERSION):
    with server(tmp_path / "s", behave) as path, pytest.raises(SpdkError) as caught:
        call(path, rpc, seconds)
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith(f"SPDK at {path}: {rpc}: ")
    return caught.value


def test_result(tgt):
    assert call(tgt.socket, VERSION)["fields"]["major"] == 26


def test_parameters_arrive_as_they_are(tgt):
    params = {"ctrlr": "ünïcode \N{GRINNING FACE}", "dev_name": 'x"\\'}
    with pytest.raises(SpdkError):
        call(tgt.socket, Rpc("vhost_create_blk_controller", params))
    assert tgt.requests[-1] == ("vhost_create_blk_controller", params)


def test_refusal_names_rpc_parameters_reason_and_fix(tgt):
    rpc = Rpc("vhost_create_blk_controller", {"ctrlr": "a.kv", "dev_name": "Nvme9n1"})
    with pytest.raises(SpdkError) as caught:
        call(tgt.socket, rpc)
    assert str(caught.value) == (
        f'SPDK at {tgt.socket}: vhost_create_blk_controller {{"ctrlr": "a.kv", "dev_name": "Nvme9n1"}}: '
        "No such device (code -32602); no such bdev: `forebay spdk status` lists those there are"
    )
    assert caught.value.code == -32602


@pytest.mark.parametrize(
    ("method", "code", "message", "fix"),
    [
        ("nothing", -32601, "Method not found", "such as spdk_tgt"),
        ("bdev_get_bdevs", -1, "Method may only be called after framework is initialized. state", "framework_start"),
        ("vhost_delete_controller", -32602, "Device or resource busy", "stop the engine"),
        ("vhost_create_blk_controller", -32602, "File exists", "another --name"),
        ("vhost_create_blk_controller", -32602, "Operation not permitted", "claimed"),
        ("bdev_nvme_attach_controller", -19, "No such device", "scripts/setup.sh"),
        ("bdev_nvme_attach_controller", -114, "A controller named a already exists", "another --name"),
        ("bdev_get_iostat", -12, "Cannot allocate memory", "see the target's log"),
    ],
)
def test_every_refusal_has_a_fix(tgt, method, code, message, fix):
    tgt.failures[method] = (0, Refused(code, message))
    with pytest.raises(SpdkError) as caught:
        call(tgt.socket, Rpc(method))
    assert message in str(caught.value)
    assert fix in str(caught.value).rpartition(";")[2]


def test_no_target(tmp_path):
    with pytest.raises(SpdkError, match=r"No such file or directory; start spdk_tgt, or give --socket"):
        call(tmp_path / "absent", VERSION)


def test_target_that_ended(tmp_path):
    with server(tmp_path / "s", answering(b"")):
        pass
    with pytest.raises(SpdkError, match="Connection refused; nobody listens there any more: start spdk_tgt"):
        call(tmp_path / "s", VERSION)


def test_path_longer_than_a_socket_may_have(tmp_path):
    with pytest.raises(SpdkError, match="too long; give another --socket"):
        call(tmp_path / ("x" * 120), VERSION)


@pytest.mark.needs("root")
def test_no_permission(tgt):
    tgt.socket.chmod(0o600)
    tgt.folder.chmod(0o755)
    code = f"""if True:
        import os, pathlib, sys
        from forebay.storage.spdk.rpc import Rpc, SpdkError, call
        import spdk.rpc.client
        os.setuid(65534)
        try:
            call(pathlib.Path({str(tgt.socket)!r}), Rpc("spdk_get_version"))
        except SpdkError as error:
            print(error)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Permission denied; run this as the user who runs the target (sudo)" in done.stdout


def test_without_the_package(tgt, monkeypatch):
    monkeypatch.setitem(sys.modules, "spdk.rpc.client", None)
    with pytest.raises(SpdkError, match=r'`spdk` is missing; install it: pip install "forebay\[spdk\]"'):
        call(tgt.socket, VERSION)


def test_hanging_server_costs_the_time_out_and_no_cpu(tmp_path):
    started, cpu = time.monotonic(), time.process_time()
    error = outcome(tmp_path, lambda connection: connection.recv(65536) and connection.recv(1), seconds=0.5)
    assert 0.4 < time.monotonic() - started < 2.5
    assert time.process_time() - cpu < 0.3
    assert "no answer after 0.5 s, without an answer; the target may still do it" in str(error)
    assert error.code is None


def test_server_that_accepts_nobody(tmp_path):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "s"))
    listener.listen(0)
    waiting = []
    with contextlib.suppress(BlockingIOError):
        while True:
            waiting.append(socket.socket(socket.AF_UNIX))
            waiting[-1].setblocking(False)
            waiting[-1].connect(str(tmp_path / "s"))
    with pytest.raises(SpdkError, match=r"no answer after 0\.3 s"):
        call(tmp_path / "s", VERSION, 0.3)
    for one in (listener, *waiting):
        one.close()


def test_dripping_server_does_not_extend_the_time_out(tmp_path):
    def drip(connection):
        connection.recv(65536)
        for _ in range(100):
            connection.sendall(b'{"a": "')
            time.sleep(0.05)

    started = time.monotonic()
    error = outcome(tmp_path, drip, seconds=0.5)
    assert time.monotonic() - started < 2.5
    assert "bytes that are no whole answer" in str(error)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "which is not JSON-RPC; is --socket the RPC socket"),
        (b"\x00\xff" * 400, "which is not JSON-RPC"),
        (b"[]", "which is not JSON-RPC"),
        (b"{}", "answered {}"),
        (b'{"a":' * 100_000 + b"}" * 100_000, "nested too deeply"),
        (b'{"jsonrpc": "2.0", "id": 7, "result": true}', "no answer to this"),
        (b'{"jsonrpc": "2.0", "id": 1}', "no answer to this"),
        (b'{"id": 1, "error": {}}', "refused without a reason (code 0); see the target's log"),
        (b'{"id": 1, "error": {"code": -32602}}', "refused without a reason (code -32602)"),
        (b'{"id": 1, "error": "no"}', "refused without a reason"),
        (b'{"id": 1, "error": null}', "refused without a reason"),
        (b'{"id": 1, "error": {"code": "x", "message": ["y"]}}', "['y'] (code 0)"),
        (b'{"id": null, "error": {"code": -32700, "message": "Parse error"}}', "Parse error (code -32700)"),
    ],
)
def test_odd_answers(tmp_path, data, problem):
    assert problem in str(outcome(tmp_path, answering(data)))


def test_server_that_closes_at_once(tmp_path):
    text = str(outcome(tmp_path, lambda connection: None))
    assert "closed the connection without an answer; see the target's log" in text or "did the target end?" in text


def test_server_that_closes_in_the_middle(tmp_path):
    def stop(connection):
        connection.recv(65536)
        connection.sendall(b'{"jsonrpc": "2.0", "id": 1, "resu')

    assert "closed the connection after 33 bytes that are no whole answer" in str(outcome(tmp_path, stop))


def test_large_answer_with_characters_across_the_pieces(tmp_path):
    expected = {"names": ["é€\N{GRINNING FACE}" * 50_000, "}" * 1_000_000]}
    data = json.dumps({"jsonrpc": "2.0", "id": 1, "result": expected}, ensure_ascii=False).encode()
    started = time.monotonic()
    with server(tmp_path / "s", answering(b"\n " + data + b"\n")) as path:
        assert call(path, VERSION, 30) == expected
    assert time.monotonic() - started < 10


def test_endless_answer(tmp_path, monkeypatch):
    monkeypatch.setattr("forebay.storage.spdk.rpc.LARGEST", 1 << 20)

    def flood(connection):
        connection.recv(65536)
        connection.sendall(b'{"')
        while True:
            connection.sendall(b"x" * 65536)

    assert "longer than 1.0 MiB" in str(outcome(tmp_path, flood, seconds=20))


@given(st.binary(max_size=200))
def test_any_bytes(server_of_bytes, data):
    path, answer = server_of_bytes
    answer[:] = data
    with pytest.raises(SpdkError) as caught:
        call(path, VERSION, 5)
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def server_of_bytes(tmp_path_factory):
    answer = bytearray()

    def behave(connection):
        connection.recv(65536)
        connection.sendall(bytes(answer))

    with server(tmp_path_factory.mktemp("any") / "s", behave) as path:
        yield path, answer


def test_nothing_is_left_behind(tgt):
    call(tgt.socket, VERSION)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        call(tgt.socket, VERSION)
        with pytest.raises(SpdkError):
            call(tgt.socket, Rpc("nothing"))
    assert len(os.listdir("/proc/self/fd")) <= before + 2  # the server closes its side when it gets to it
    assert logging.getLogger(f"JSONRPCClient({tgt.socket})").handlers == []


def test_from_several_threads_at_once(tgt):
    results = []

    def ask():
        results.extend(call(tgt.socket, VERSION)["version"] for _ in range(20))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 80
    assert len(set(results)) == 1
