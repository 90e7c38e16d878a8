"""How fast the devices are: measured by calibration, corrected by what is observed while serving."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from forebay.storage.config import DeviceConfig

logger = logging.getLogger(__name__)

DEFAULT_READ = {"dram": 8e9, "file": 1.5e9, "spdk": 3e9}
"""Bytes/s of a device that was never measured (our choice: one core's copy, a modest SSD, a good one)."""
ALPHA = 0.1
"""Weight of one observation in the moving average (our choice: half-life of about seven)."""
CLAMP = 2.0
"""One observation counts as at most this factor above or below the estimate (our choice), so that a single hiccup
moves it by at most 10% up or 5% down, while a device that stays slow is believed within a few dozen."""
FLOOR = 1e6
"""No device is estimated below this (bytes/s): it could never show that it has recovered."""


class DeviceProfile(BaseModel):
    """One device. Bandwidths in bytes/s, latency in seconds; 0 where not measured."""

    model_config = ConfigDict(extra="ignore", validate_assignment=True)

    kind: str
    read_bandwidth: float = Field(default=0.0, ge=0)
    """Measured alone."""
    write_bandwidth: float = Field(default=0.0, ge=0)
    read_together: float = Field(default=0.0, ge=0)
    """Measured while all other devices of the pool were busy as well."""
    write_together: float = Field(default=0.0, ge=0)
    latency: float = Field(default=0.0, ge=0)
    """Of one small read."""
    observed: float = Field(default=0.0, ge=0)
    """Moving average of the read bandwidth while serving."""

    @property
    def weight(self) -> float:
        """Read bandwidth to place by: as observed, else measured together, else alone, else the kind's default."""
        return self.observed or self.read_together or self.read_bandwidth or DEFAULT_READ.get(self.kind, FLOOR)


class _ProfileFile(BaseModel):
    version: int = 1
    devices: dict[str, DeviceProfile] = {}


class Profile:
    """The devices of a pool by name, in the order of its configuration."""

    def __init__(self, devices: Mapping[str, DeviceProfile]) -> None:
        self.devices = dict(devices)

    @classmethod
    def load(cls, path: Path, devices: Sequence[DeviceConfig]) -> Profile:
        """The profile stored at `path`, with defaults for devices it does not know. A damaged one counts as none."""
        known = _read(path)
        profiles = {}
        for device in devices:
            found = known.get(device.name)
            profiles[device.name] = found if found and found.kind == device.kind else DeviceProfile(kind=device.kind)
        return cls(profiles)

    def save(self, path: Path) -> None:
        """Write the profile in one step.

        Raises:
            OSError: it cannot be written; the old one is still there.
        """
        new = path.with_suffix(".new")
        new.write_text(_ProfileFile(devices=self.devices).model_dump_json(indent=2))
        new.replace(path)

    def observe(self, name: str, read_bandwidth: float) -> None:
        """Move the estimate of a device towards `read_bandwidth` (bytes/s). Unknown names are ignored."""
        device = self.devices.get(name)
        if device is None or not read_bandwidth > 0:
            return
        estimate = device.weight
        bounded = min(max(read_bandwidth, estimate / CLAMP), estimate * CLAMP)
        device.observed = max(FLOOR, estimate + ALPHA * (bounded - estimate))

    def weights(self) -> list[float]:
        """Read bandwidths to place by (bytes/s), in the order of the configuration."""
        return [device.weight for device in self.devices.values()]

    def latencies(self) -> list[float]:
        """Seconds, in the order of the configuration."""
        return [device.latency for device in self.devices.values()]


def _read(path: Path) -> dict[str, DeviceProfile]:
    try:
        return _ProfileFile.model_validate(json.loads(path.read_text())).devices
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, ValidationError) as error:
        problem = str(error).splitlines()[0]
        logger.warning("profile %s cannot be read (%s); run `forebay calibrate` to measure anew", path, problem)
        return {}
