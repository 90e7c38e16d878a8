"""An SPDK target as we need it: its bdevs, its vhost controllers, and the RPCs that make and remove them."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from forebay.storage.spdk.rpc import SECONDS, Rpc, SpdkError, call

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Bdev:
    """A block device of the target."""

    name: str
    driver: str
    """SPDK's product name, such as `NVMe disk`."""
    size: int
    """Bytes."""
    block: int
    """Bytes."""
    claimed: bool
    """A module of SPDK (a volume store, a RAID, NVMe-oF) has it for itself."""
    pci: str = ""
    """Of the NVMe drive that it lies on, such as `0000:5e:00.0`."""
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Controller:
    """A vhost controller of the target."""

    name: str
    socket: Path
    bdev: str | None
    """None when the bdev has vanished, empty when this is no block controller."""
    readonly: bool
    sessions: int | None
    """Initiators that are connected; None when the target is of an older release that does not say."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a bdev has done since the target started."""

    read_bytes: int
    write_bytes: int
    read_ops: int
    write_ops: int
    read_seconds: float
    """Sum of the latencies of all reads."""
    write_seconds: float


class Target:
    """The target that listens at `address`. Every method is one RPC and raises `SpdkError` when it fails."""

    def __init__(self, address: Path, seconds: float = SECONDS) -> None:
        self.address = address
        self.seconds = seconds

    def send(self, rpc: Rpc) -> Any:
        """Any RPC."""
        return call(self.address, rpc, self.seconds)

    def version(self) -> str:
        """Such as `SPDK v26.09`."""
        rpc = Rpc("spdk_get_version")
        return self._read(rpc, lambda answer: str(answer["version"]))

    def bdevs(self) -> list[Bdev]:
        """All of them."""
        rpc = Rpc("bdev_get_bdevs")
        return self._read(rpc, lambda answer: [_bdev(one) for one in answer])

    def drives(self) -> dict[str, str]:
        """NVMe controllers: name -> PCI address, empty when the drive is elsewhere (NVMe over fabrics)."""
        rpc = Rpc("bdev_nvme_get_controllers")
        return self._read(rpc, lambda answer: {str(one["name"]): _address(one) for one in answer})

    def controllers(self) -> list[Controller]:
        """All of them, also those that are not for blocks."""
        rpc = Rpc("vhost_get_controllers")
        return self._read(rpc, lambda answer: [_controller(one) for one in answer])

    def traffic(self) -> dict[str, Traffic]:
        """By name of the bdev."""
        rpc = Rpc("bdev_get_iostat")
        return self._read(rpc, lambda answer: dict(_traffic(answer)))

    def _read(self, rpc: Rpc, understand: Callable[[Any], T]) -> T:
        answer = self.send(rpc)
        try:
            return understand(answer)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            problem = f"cannot make sense of the answer ({type(error).__name__}: {error})"
            raise SpdkError(self.address, rpc, problem, "is it an SPDK target of release 22.01 or later?") from None


def drive_rpc(name: str, pci: str) -> Rpc:
    """Take the NVMe drive at `pci`; its bdevs are called `name` and `n1`, `n2`..."""
    # Without `multipath`, a second drive under a name that exists would become another path to the first.
    return Rpc("bdev_nvme_attach_controller", {"name": name, "trtype": "PCIe", "traddr": pci, "multipath": "disable"})


def release_rpc(name: str) -> Rpc:
    """Give the drive back; all its bdevs vanish."""
    return Rpc("bdev_nvme_detach_controller", {"name": name})


def serve_rpc(controller: str, bdev: str) -> Rpc:
    """Serve `bdev` at a socket called `controller`."""
    return Rpc("vhost_create_blk_controller", {"ctrlr": controller, "dev_name": bdev})


def unserve_rpc(controller: str) -> Rpc:
    """Remove the socket. Recent releases of SPDK do not answer before the last initiator has gone."""
    return Rpc("vhost_delete_controller", {"ctrlr": controller})


def is_gone(error: SpdkError) -> bool:
    """Whether the target refused because there is no such thing (any more)."""
    return error.code is not None and (error.code == -errno.ENODEV or "No such device" in str(error))


def _bdev(one: dict[str, Any]) -> Bdev:
    return Bdev(
        name=str(one["name"]),
        driver=str(one.get("product_name", "")),
        size=int(one["block_size"]) * int(one["num_blocks"]),
        block=int(one["block_size"]),
        claimed=bool(one.get("claimed")),
        pci=_pci(one.get("driver_specific") or {}),
        aliases=tuple(str(alias) for alias in one.get("aliases", ())),
    )


def _pci(details: dict[str, Any]) -> str:
    """`nvme` holds one object for every path; in early releases it is the object."""
    paths = details.get("nvme") or []
    for path in [paths] if isinstance(paths, dict) else paths:
        if path.get("pci_address"):
            return str(path["pci_address"]).lower()
    return ""


def _address(one: dict[str, Any]) -> str:
    """One path of several counts; in early releases the drive itself is the path."""
    trid = (one.get("ctrlrs") or [one])[0].get("trid") or {}
    return str(trid["traddr"]).lower() if str(trid.get("trtype", "")).lower() == "pcie" else ""


def _controller(one: dict[str, Any]) -> Controller:
    backend = one.get("backend_specific") or {}
    block = backend.get("block", {"bdev": ""})
    return Controller(
        name=str(one["ctrlr"]),
        socket=Path(one["socket"]),
        bdev=block.get("bdev"),
        readonly=bool(block.get("readonly")),
        sessions=len(one["sessions"]) if "sessions" in one else None,
    )


def _traffic(answer: dict[str, Any]) -> Iterable[tuple[str, Traffic]]:
    rate = int(answer["tick_rate"]) or 1
    for one in answer["bdevs"]:
        yield (
            str(one["name"]),
            Traffic(
                read_bytes=int(one["bytes_read"]),
                write_bytes=int(one["bytes_written"]),
                read_ops=int(one["num_read_ops"]),
                write_ops=int(one["num_write_ops"]),
                read_seconds=int(one.get("read_latency_ticks", 0)) / rate,
                write_seconds=int(one.get("write_latency_ticks", 0)) / rate,
            ),
        )
