"""What a target has, and what of it is ours."""

from __future__ import annotations

from dataclasses import dataclass

from forebay.storage.spdk.record import Record
from forebay.storage.spdk.target import Bdev, Controller, Target, Traffic


@dataclass(frozen=True, slots=True)
class BdevStatus:
    """A bdev, who made it and what it has done."""

    bdev: Bdev
    ours: bool
    """Its drive was given to the target by `forebay spdk attach`."""
    traffic: Traffic | None


@dataclass(frozen=True, slots=True)
class ControllerStatus:
    """A controller and who made it."""

    controller: Controller
    ours: bool


@dataclass(frozen=True, slots=True)
class Status:
    """The target at a glance."""

    version: str
    bdevs: list[BdevStatus]
    controllers: list[ControllerStatus]
    missing: list[str]
    """On record as ours, but not in the target: it was restarted, or somebody removed them."""


def status(target: Target, record: Record) -> Status:
    """Ask the target. Changes nothing.

    Raises:
        SpdkError: it does not answer.
    """
    bdevs = target.bdevs()
    controllers = target.controllers()
    traffic = target.traffic()
    there = {one.name for one in controllers if record.made(one.name, one.bdev)}
    drives = target.drives().items()
    ours = {pci for name, pci in drives if record.drives.get(name) == pci}
    missing = [name for name in record.controllers if name not in there]
    missing += [name for name, pci in record.drives.items() if (name, pci) not in drives]
    return Status(
        version=target.version(),
        bdevs=[BdevStatus(one, one.pci in ours, traffic.get(one.name)) for one in bdevs],
        controllers=[ControllerStatus(one, record.made(one.name, one.bdev)) for one in controllers],
        missing=missing,
    )
