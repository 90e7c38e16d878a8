"""Undoing what `attach` made in a target, and only that."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from forebay.storage.errors import ForebayError
from forebay.storage.spdk.attach import SUFFIX
from forebay.storage.spdk.record import Record
from forebay.storage.spdk.rpc import Rpc, SpdkError
from forebay.storage.spdk.target import Bdev, Controller, Target, is_gone, release_rpc, unserve_rpc


class DetachError(ForebayError):
    """Something cannot be undone now."""


@dataclass(slots=True)
class Undone:
    """What `detach` did, or would do."""

    sent: list[Rpc] = field(default_factory=list)
    """RPCs that change the target, in order."""
    notes: list[str] = field(default_factory=list)
    """What was left alone or was gone already."""


def detach(target: Target, record: Record, names: Collection[str] = (), *, dry_run: bool = False) -> Undone:
    """Remove the controllers on record, all or those of the devices `names`, then the drives that nothing else uses.

    All is checked before anything is changed. What was removed leaves the record at once, so that an interrupted
    detach can be run again.

    Raises:
        DetachError: an initiator is connected, or a name is not on record.
        SpdkError: the target refused, or did not answer.
    """
    return _Removal(target, record, dry_run).run(_chosen(record, names), every=not names)


def _chosen(record: Record, names: Collection[str]) -> list[str]:
    if not names:
        return list(record.controllers)
    for name in names:
        if name + SUFFIX not in record.controllers:
            ours = ", ".join(one.removesuffix(SUFFIX) for one in record.controllers) or "nothing"
            raise DetachError(
                f"{name!r} was not made by `forebay spdk attach`, which made {ours}; "
                f"what others made they remove: `spdk-rpc vhost_delete_controller`"
            )
    return [name + SUFFIX for name in dict.fromkeys(names)]


class _Removal:
    """One call of `detach`."""

    def __init__(self, target: Target, record: Record, dry_run: bool) -> None:
        self.target = target
        self.record = record
        self.dry_run = dry_run
        self.undone = Undone()
        self.bdevs: list[Bdev] = target.bdevs()
        self.drives = target.drives()
        self.controllers: dict[str, Controller] = {one.name: one for one in target.controllers()}

    def run(self, chosen: list[str], every: bool) -> Undone:
        served = {self.record.controllers[name] for name in chosen}
        addresses = {bdev.pci for bdev in self.bdevs if bdev.name in served}
        ours = [name for name in chosen if self._is_ours(name)]
        self._refuse_connected(ours)
        for name in chosen:
            if name in ours:
                self._send(unserve_rpc(name))
                del self.controllers[name]
            self._forget(self.record.controllers, name)
        for name, pci in list(self.record.drives.items()):
            if every or pci in addresses:
                self._release(name, pci)
        return self.undone

    def _is_ours(self, name: str) -> bool:
        """Whether the controller is still the one that we made."""
        there = self.controllers.get(name)
        if there is None:
            self.undone.notes.append(f"controller {name} is gone already")
            return False
        if not self.record.made(name, there.bdev):
            self.undone.notes.append(
                f"controller {name} serves {there.bdev or 'no bdev'} now: somebody else made it, it stays"
            )
            return False
        return True

    def _refuse_connected(self, names: list[str]) -> None:
        for name in names:
            controller = self.controllers[name]
            if controller.sessions:
                count = f"{controller.sessions} initiator{'s' * (controller.sessions > 1)}"
                raise DetachError(
                    f"controller {name} has {count} connected; stop the engine that uses "
                    f"{controller.socket}, then detach again (nothing was changed)"
                )

    def _release(self, name: str, pci: str) -> None:
        """Give the drive back unless somebody else uses it by now."""
        bdevs = {bdev.name: bdev for bdev in self.bdevs if bdev.pci == pci}
        if self.drives.get(name) != pci:
            self.undone.notes.append(f"drive {name} ({pci}) is gone already, or somebody else's")
            self._forget(self.record.drives, name)
            return
        users = [one.name for one in self.controllers.values() if one.bdev in bdevs]
        users += [bdev.name for bdev in bdevs.values() if bdev.claimed]
        if users:
            self.undone.notes.append(f"drive {name} ({pci}) stays: {', '.join(users)} uses it")
            return
        self._send(release_rpc(name))
        self._forget(self.record.drives, name)

    def _send(self, rpc: Rpc) -> None:
        self.undone.sent.append(rpc)
        if self.dry_run:
            return
        try:
            self.target.send(rpc)
        except SpdkError as error:
            if not is_gone(error):
                raise

    def _forget(self, made: dict[str, str], name: str) -> None:
        if not self.dry_run:
            del made[name]
            self.record.save()
