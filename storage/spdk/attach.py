"""Making drives and bdevs of a target ready to be devices of a pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from forebay.storage.errors import ForebayError
from forebay.storage.spdk.record import Record
from forebay.storage.spdk.rpc import Rpc, SpdkError
from forebay.storage.spdk.target import (
    Bdev,
    Controller,
    Target,
    drive_rpc,
    is_gone,
    release_rpc,
    serve_rpc,
    unserve_rpc,
)
from forebay.storage.spdk.wanted import Wanted, device_name

SUFFIX = ".kv"
"""A device's controller is called like the device and this."""


class AttachError(ForebayError):
    """A drive or bdev cannot be served as asked."""


@dataclass(frozen=True, slots=True)
class Attached:
    """A device of kind `spdk`, ready for a pool."""

    name: str
    path: Path
    """The controller's socket."""
    bdev: str
    size: int
    """Bytes."""
    made: bool
    """False: it was there already."""


@dataclass(slots=True)
class Done:
    """What `attach` did, or would do."""

    devices: list[Attached] = field(default_factory=list)
    sent: list[Rpc] = field(default_factory=list)
    """RPCs that change the target, in order."""
    notes: list[str] = field(default_factory=list)
    """What was left as it is."""


def attach(target: Target, wanted: Sequence[Wanted], record: Record, *, dry_run: bool = False) -> Done:
    """Serve every drive and bdev in `wanted` at a socket of its own. What is there as wanted is left.

    All is checked before anything is changed. When the target then refuses something, what this call has made is
    undone; when it stops answering, that stays on record, since nobody knows what it did.

    Raises:
        SpdkError, AttachError, RecordError: with everything as it was, or the error says what stayed.
    """
    attempt = _Attempt(target, record, dry_run)
    attempt.look()
    attempt.check_all(wanted)
    try:
        for one in wanted:
            attempt.attach(one)
    except SpdkError as error:
        if error.code is None:
            raise _unknown(error, record) from None
        attempt.undo(error)
        raise
    except AttachError as error:
        attempt.undo(error)
        raise
    return attempt.done


def _unknown(error: SpdkError, record: Record) -> AttachError:
    made = ", ".join([*record.controllers, *record.drives])
    return AttachError(f"{error}; on record as ours: {made or 'nothing'} (`forebay spdk detach` removes what there is)")


class _Attempt:
    """One call of `attach`."""

    def __init__(self, target: Target, record: Record, dry_run: bool) -> None:
        self.target = target
        self.record = record
        self.dry_run = dry_run
        self.done = Done()
        self.bdevs: dict[str, Bdev] = {}
        self.controllers: dict[str, Controller] = {}
        self.drives: dict[str, str] = {}

    def look(self) -> None:
        """See what the target has now."""
        self.bdevs = {bdev.name: bdev for bdev in self.target.bdevs()}
        self.controllers = {controller.name: controller for controller in self.target.controllers()}
        self.drives = self.target.drives()

    def check_all(self, wanted: Sequence[Wanted]) -> None:
        """Refuse what cannot be served, before anything is changed."""
        seen: set[str] = set()
        for one in wanted:
            self.check(one)
            bdevs = {bdev.name for bdev in self._existing(one)}
            if bdevs & seen:
                raise AttachError(f"{', '.join(bdevs & seen)} is asked for twice, under two names; give it once")
            seen |= bdevs

    def check(self, one: Wanted) -> None:
        """Refuse a drive or bdev that cannot be served as the target is now."""
        if one.bdev and self._find(one.bdev) is None:
            raise AttachError(
                f"bdev {one.bdev!r} is not in the target at {self.target.address}; "
                "`forebay spdk status` lists those there are, and a drive is given by its PCI address"
            )
        for bdev in self._existing(one):
            self._check_bdev(bdev, self._device(one, bdev.name))
        if one.pci and one.pci not in self.drives.values():
            self._check_names(one)
        elif not self._existing(one):
            raise AttachError(f"the drive at {one.pci} has no namespace; make one with `nvme create-ns`")

    def _check_names(self, one: Wanted) -> None:
        """A drive that is still to be taken needs a name that nothing has."""
        controller = self.controllers.get(one.name + SUFFIX)
        if controller is not None:
            raise AttachError(f"controller {controller.name} is there already; give another --name")
        if one.name in self.drives:
            raise AttachError(f"the target calls another drive than {one.pci} {one.name}; give another --name")

    def _check_bdev(self, bdev: Bdev, name: str) -> None:
        wanted = name + SUFFIX
        for controller in self.controllers.values():
            if controller.bdev == bdev.name and controller.name != wanted:
                raise AttachError(
                    f"bdev {bdev.name} is served by controller {controller.name} already, and two would overwrite each "
                    f"other; use {controller.socket} as the device's path, or remove that controller first"
                )
        ours = self.controllers.get(wanted)
        if ours and ours.bdev != bdev.name:
            raise AttachError(
                f"controller {wanted} serves {ours.bdev or 'no bdev'}, not {bdev.name}; give another --name"
            )
        if ours and ours.readonly:
            raise AttachError(f"controller {wanted} is read-only; remove it first, or give another --name")
        if bdev.claimed and not ours:
            raise AttachError(f"bdev {bdev.name} is claimed by another module of the target; choose another bdev")

    def attach(self, one: Wanted) -> None:
        """Make the device, or find it there."""
        if one.pci and one.pci not in self.drives.values():
            self._take_drive(one)
        elif one.pci:
            self.done.notes.append(f"the drive at {one.pci} belongs to the target already")
        for bdev in self._existing(one):
            self._serve(bdev, self._device(one, bdev.name))

    def _take_drive(self, one: Wanted) -> None:
        if self.dry_run:
            self.done.sent.append(drive_rpc(one.name, one.pci))
            self.bdevs[f"{one.name}n1"] = Bdev(f"{one.name}n1", "NVMe disk", 0, 512, claimed=False, pci=one.pci)
            return
        self._make(drive_rpc(one.name, one.pci), self.record.drives, one.name, one.pci)
        self.check(one)

    def _serve(self, bdev: Bdev, name: str) -> None:
        controller = self.controllers.get(name + SUFFIX)
        if controller is not None:
            self.done.notes.append(f"controller {controller.name} serves {bdev.name} already")
            self.done.devices.append(Attached(name, controller.socket, bdev.name, bdev.size, made=False))
            return
        self._check_bdev(bdev, name)
        path = Path(f"{name}{SUFFIX}")
        if self.dry_run:
            self.done.sent.append(serve_rpc(path.name, bdev.name))
        else:
            self._make(serve_rpc(path.name, bdev.name), self.record.controllers, path.name, bdev.name)
            path = self._socket(path.name)
        self.done.devices.append(Attached(name, path, bdev.name, bdev.size, made=True))

    def _make(self, rpc: Rpc, made: dict[str, str], name: str, of: str) -> None:
        """Put it on record, then ask the target for it."""
        before = made.get(name)
        made[name] = of
        self.record.save()
        try:
            self.target.send(rpc)
        except SpdkError as error:
            if error.code is not None:
                _restore(made, name, before)
                self.record.save()
            raise
        self.done.sent.append(rpc)
        self.look()

    def _socket(self, controller: str) -> Path:
        if controller not in self.controllers:
            raise AttachError(f"controller {controller} is not there after it was made; see the target's log")
        return self.controllers[controller].socket

    def undo(self, cause: ForebayError) -> None:
        """Take back what this call made, latest first; what cannot be taken back stays on record.

        Raises:
            AttachError: `cause`, and what stayed.
        """
        for rpc in reversed(self.done.sent):
            made, name, reverse = _reverse(rpc, self.record)
            try:
                self.target.send(reverse)
            except SpdkError as error:
                if not is_gone(error):
                    raise AttachError(f"{cause}; {name} stays, `forebay spdk detach` removes it ({error})") from None
            del made[name]
            self.record.save()

    def _find(self, name: str) -> Bdev | None:
        by_alias = (bdev for bdev in self.bdevs.values() if name in bdev.aliases)
        return self.bdevs.get(name) or next(by_alias, None)

    def _existing(self, one: Wanted) -> list[Bdev]:
        if one.pci:
            return sorted((bdev for bdev in self.bdevs.values() if bdev.pci == one.pci), key=lambda bdev: bdev.name)
        found = self._find(one.bdev)
        return [found] if found else []

    def _device(self, one: Wanted, bdev: str) -> str:
        """A drive of one namespace gives its name to the device; of several, each bdev gives its own."""
        return one.name if len(self._existing(one)) == 1 else device_name(bdev)


def _restore(made: dict[str, str], name: str, before: str | None) -> None:
    if before is None:
        del made[name]
    else:
        made[name] = before


def _reverse(rpc: Rpc, record: Record) -> tuple[dict[str, str], str, Rpc]:
    if rpc.method == "bdev_nvme_attach_controller":
        name = rpc.params["name"]
        return record.drives, name, release_rpc(name)
    name = rpc.params["ctrlr"]
    return record.controllers, name, unserve_rpc(name)
