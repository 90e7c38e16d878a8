"""What an operator asks to be served: drives by PCI address, bdevs by name, and what the devices shall be called."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from forebay.storage.errors import ConfigError

_PCI = re.compile(r"^(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])$", re.IGNORECASE)
_NAME = re.compile(r"^[A-Za-z0-9._-]{1,64}$")


@dataclass(frozen=True, slots=True)
class Wanted:
    """A drive or a bdev that is to become a device."""

    name: str
    """Of the device."""
    pci: str = ""
    """Of the drive, lower case with its domain; empty for a bdev."""
    bdev: str = ""


def parse(sources: Sequence[str], names: Sequence[str] = ()) -> list[Wanted]:
    """PCI addresses and names of bdevs, with the devices' names in the same order or derived from them.

    Raises:
        ConfigError: a name that no device can have, or not one name for each.
    """
    if names and len(names) != len(sources):
        raise ConfigError(f"{len(names)} --name for {len(sources)} drives and bdevs; give one for each, or none")
    wanted = [_wanted(source, name) for source, name in zip(sources, names or [""] * len(sources), strict=True)]
    for one in wanted:
        if not _NAME.match(one.name):
            raise ConfigError(f"--name {one.name!r} must be 1 to 64 letters, digits, '.', '_' or '-'")
    for key in ("name", "pci", "bdev"):
        values = [getattr(one, key) for one in wanted if getattr(one, key)]
        twice = sorted({value for value in values if values.count(value) > 1})
        if twice:
            raise ConfigError(f"{twice[0]!r} is given twice; give every drive, bdev and --name once")
    return wanted


def device_name(text: str) -> str:
    """`text` with what no device's name may have replaced."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", text)


def _wanted(source: str, name: str) -> Wanted:
    match = _PCI.match(source)
    if match is None:
        return Wanted(name or device_name(source), bdev=source)
    domain, bus, slot, function = (part or "0000" for part in match.groups())
    pci = f"{domain}:{bus}:{slot}.{function}".lower()
    return Wanted(name or device_name(f"nvme-{pci}"), pci=pci)
