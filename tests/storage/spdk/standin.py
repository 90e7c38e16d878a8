"""A stand-in for `spdk_tgt`: its JSON-RPC is imitated, the vhost-user-blk servers behind it are real.

    with Standin(folder, {"Malloc0": file}) as target:
        ...  # JSON-RPC at target.socket
        path = target.serve("nvme0.kv", "Malloc0")  # a real vhost-user-blk socket

`vhost_create_blk_controller` starts a qemu-storage-daemon that exports the bdev's file at the controller's socket.
Answers, error codes and texts are those of SPDK's sources. What differs from the real thing: one initiator at a time
per controller (qemu-storage-daemon 7.2; SPDK takes many), and the I/O statistics are whatever `traffic` says.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from forebay.bench.storage_daemon import StorageDaemon

BLOCK = 512
TICKS = 2_400_000_000
CONNECTED = "03"
"""A socket's state in /proc/net/unix."""


class Refused(Exception):
    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class Lost(Exception):
    """The connection is lost before or after the target has done what was asked."""

    def __init__(self, *, done: bool) -> None:
        super().__init__(f"lost with done={done}")
        self.done = done


class Server(StorageDaemon):
    """The real thing behind one controller."""

    def sessions(self) -> int:
        """Initiators that are connected."""
        lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
        return sum(fields[5] == CONNECTED for fields in lines if fields[-1] == str(self.socket))


class Standin:
    """The target. Its methods are for tests; everybody else sends RPCs to `socket`."""

    def __init__(
        self,
        folder: Path,
        bdevs: Mapping[str, Path] | None = None,
        drives: Mapping[str, list[Path]] | None = None,
        *,
        delete_waits: bool = False,
        old: bool = False,
    ) -> None:
        """
        Args:
            folder: of the RPC socket and of the controllers' sockets; a short path.
            bdevs: name -> file, there from the start.
            drives: PCI address -> one file for each namespace, for `bdev_nvme_attach_controller`.
            delete_waits: `vhost_delete_controller` waits until no initiator is connected, as in recent releases,
                instead of refusing.
            old: leave out what older releases do not say.
        """
        self.folder = folder
        self.socket = folder / "spdk.sock"
        self.bdevs: dict[str, dict[str, Any]] = {}
        self.files: dict[str, Path] = {}
        self.drives = dict(drives or {})
        self.attached: dict[str, str] = {}
        self.controllers: dict[str, tuple[str, Server]] = {}
        self.traffic: dict[str, dict[str, int]] = {}
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.failures: dict[str, tuple[int, Refused | Lost | Callable[[], None]]] = {}
        """Method -> after how many calls, what happens once: a refusal, a lost connection, or a call first."""
        self.delete_waits = delete_waits
        self.old = old
        self.lock = threading.RLock()
        self.closed = False
        for name, file in (bdevs or {}).items():
            self.add_bdev(name, file)

    def __enter__(self) -> Self:
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(self.socket))
        self.listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.socket.unlink(missing_ok=True)
        self.restart()

    def restart(self) -> None:
        """Forget controllers and drives, as a target that was started again."""
        with self.lock:
            for _, server in self.controllers.values():
                _stop(server)
            self.controllers.clear()
            for name in list(self.attached):
                self.bdev_nvme_detach_controller(name)

    def add_bdev(self, name: str, file: Path, driver: str = "Malloc disk", **more: Any) -> None:
        self.files[name] = file
        self.bdevs[name] = {
            "name": name,
            "aliases": [f"alias/{name}"],
            "product_name": driver,
            "block_size": BLOCK,
            "num_blocks": file.stat().st_size // BLOCK,
            "claimed": False,
            "driver_specific": {},
        } | more

    def serve(self, controller: str, bdev: str) -> Path:
        """As an operator would: a controller that nobody has on record."""
        self.vhost_create_blk_controller(controller, bdev)
        return self.controllers[controller][1].socket

    def start_server(self, file: Path, path: Path) -> Server:
        """What stands behind a controller."""
        server = Server(file, path)
        server.start()
        return server

    def changes(self) -> list[str]:
        """The methods that were asked for and change something."""
        reads = {"bdev_get_bdevs", "vhost_get_controllers", "bdev_get_iostat", "spdk_get_version"}
        reads.add("bdev_nvme_get_controllers")
        return [method for method, _ in self.requests if method not in reads]

    # The RPCs.

    def spdk_get_version(self) -> dict[str, Any]:
        fields = {"major": 26, "minor": 9, "patch": 0, "suffix": "", "commit": "standin"}
        return {"version": "SPDK v26.09 git sha1 standin", "fields": fields}

    def bdev_get_bdevs(self, name: str | None = None) -> list[dict[str, Any]]:
        if name is not None and name not in self.bdevs:
            raise Refused(-errno.ENODEV, os.strerror(errno.ENODEV))
        return [bdev for key, bdev in self.bdevs.items() if name in (None, key)]

    def bdev_malloc_create(self, name: str, num_blocks: int, block_size: int) -> str:
        file = self.folder / f"{name}.malloc"
        with file.open("wb") as made:
            made.truncate(num_blocks * block_size)
        self.add_bdev(name, file)
        return name

    def bdev_malloc_delete(self, name: str) -> bool:
        if name not in self.bdevs:
            raise Refused(-errno.ENODEV, os.strerror(errno.ENODEV))
        del self.bdevs[name]
        return True

    def bdev_get_iostat(self) -> dict[str, Any]:
        keys = ("bytes_read", "num_read_ops", "bytes_written", "num_write_ops")
        keys += ("read_latency_ticks", "write_latency_ticks")
        zero = dict.fromkeys(keys, 0)
        bdevs = [{"name": name} | zero | self.traffic.get(name, {}) for name in self.bdevs]
        return {"tick_rate": TICKS, "ticks": 1, "bdevs": bdevs}

    def bdev_nvme_attach_controller(self, name: str, trtype: str, traddr: str, multipath: str = "") -> list[str]:
        if name in self.attached:
            text = f"A controller named {name} already exists and multipath is disabled"
            raise Refused(-errno.EALREADY, text)
        if traddr not in self.drives:
            raise Refused(-errno.ENODEV, os.strerror(errno.ENODEV))
        path = {"pci_address": traddr, "trid": {"trtype": "PCIe", "traddr": traddr}}
        names = []
        for number, file in enumerate(self.drives[traddr], 1):
            names.append(f"{name}n{number}")
            specific = {"nvme": path if self.old else [path], "mp_policy": "active_passive"}
            self.add_bdev(names[-1], file, "NVMe disk", driver_specific=specific)
        self.attached[name] = traddr
        return names

    def bdev_nvme_get_controllers(self) -> list[dict[str, Any]]:
        paths = {name: {"trid": {"trtype": "PCIe", "traddr": pci}} for name, pci in self.attached.items()}
        return [{"name": name} | (path if self.old else {"ctrlrs": [path]}) for name, path in paths.items()]

    def bdev_nvme_detach_controller(self, name: str) -> bool:
        if name not in self.attached:
            raise Refused(-errno.ENODEV, os.strerror(errno.ENODEV))
        address = self.attached.pop(name)
        for number in range(1, len(self.drives[address]) + 1):
            del self.bdevs[f"{name}n{number}"]
        return True

    def vhost_create_blk_controller(self, ctrlr: str, dev_name: str) -> bool:
        names = {alias: name for name, bdev in self.bdevs.items() for alias in (name, *bdev["aliases"])}
        if dev_name not in names:
            raise Refused(-32602, os.strerror(errno.ENODEV))
        if self.bdevs[names[dev_name]]["claimed"]:
            raise Refused(-32602, os.strerror(errno.EPERM))
        if ctrlr in self.controllers:
            raise Refused(-32602, os.strerror(errno.EEXIST))
        self.controllers[ctrlr] = (names[dev_name], self.start_server(self.files[names[dev_name]], self.folder / ctrlr))
        return True

    def vhost_get_controllers(self, name: str | None = None) -> list[dict[str, Any]]:
        if name is not None and name not in self.controllers:
            raise Refused(-32603, os.strerror(errno.ENODEV))
        return [self._describe(key) for key in self.controllers if name in (None, key)]

    def vhost_delete_controller(self, ctrlr: str) -> bool:
        if ctrlr not in self.controllers:
            raise Refused(-32602, os.strerror(errno.ENODEV))
        if self.controllers[ctrlr][1].sessions():
            raise Refused(-32602, os.strerror(errno.EBUSY))
        _stop(self.controllers.pop(ctrlr)[1])
        return True

    def _describe(self, name: str) -> dict[str, Any]:
        bdev, server = self.controllers[name]
        sessions = [
            {"vid": number, "id": number, "name": f"{name}s{number}", "started": True, "max_queues": 1}
            for number in range(server.sessions())
        ]
        block = {"readonly": False, "bdev": bdev if bdev in self.bdevs else None, "transport": "vhost_user_blk"}
        found = {"ctrlr": name, "cpumask": "0x1", "delay_base_us": 0, "iops_threshold": 60000}
        found |= {"socket": str(server.socket), "sessions": sessions, "backend_specific": {"block": block}}
        if self.old:
            del found["sessions"]
        return found

    # The server.

    def _accept(self) -> None:
        while not self.closed:
            with contextlib.suppress(OSError):
                connection, _ = self.listener.accept()
                threading.Thread(target=self._converse, args=(connection,), daemon=True).start()

    def _converse(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            for request in _requests(connection):
                answer = self._answer(request)
                connection.sendall(json.dumps({"jsonrpc": "2.0", "id": request["id"]} | answer, indent=2).encode())

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        method, params = request["method"], request.get("params", {})
        while True:
            try:
                with self.lock:
                    return {"result": self._perform(method, params)}
            except Refused as refused:
                if not self._waits(method, refused):
                    return {"error": {"code": refused.code, "message": str(refused)}}
                time.sleep(0.01)

    def _waits(self, method: str, refused: Refused) -> bool:
        busy = str(refused) == os.strerror(errno.EBUSY)
        return self.delete_waits and method == "vhost_delete_controller" and busy and not self.closed

    def _perform(self, method: str, params: dict[str, Any]) -> Any:
        if not self.requests or self.requests[-1] != (method, params):
            self.requests.append((method, params))
        after, failure = self.failures.pop(method, (0, None))
        if after:
            self.failures[method] = (after - 1, failure)
        elif isinstance(failure, Refused):
            raise failure
        elif isinstance(failure, Lost):
            if failure.done:
                self._do(method, params)
            raise ConnectionAbortedError
        elif failure is not None:
            failure()
        return self._do(method, params)

    def _do(self, method: str, params: dict[str, Any]) -> Any:
        known = method.partition("_")[0] in ("spdk", "bdev", "vhost")
        perform = getattr(self, method, None) if known else None
        if perform is None:
            raise Refused(-32601, "Method not found")
        try:
            return perform(**params)
        except TypeError:
            raise Refused(-32602, "Invalid parameters") from None


def _stop(server: Server) -> None:
    server.kill()
    server.socket.unlink(missing_ok=True)


def _requests(connection: socket.socket) -> Iterator[dict[str, Any]]:
    """The JSON objects that arrive, with whatever white space between them."""
    text = ""
    while data := connection.recv(65536):
        text += data.decode()
        with contextlib.suppress(ValueError):
            while text := text.lstrip():
                request, end = json.JSONDecoder().raw_decode(text)
                text = text[end:]
                yield request
