"""The pool's configuration: one typed object per component, read from YAML, JSON or the environment.

```yaml
path: /var/lib/forebay/pool     # journal, profile and lock live here
stripe: 512KiB
devices:
  - {name: ram0,  kind: dram, size: 8GiB}
  - {name: nvme0, kind: file, size: 100GiB, path: /mnt/nvme0/forebay.kv}
  - {name: nvme1, kind: file, path: /dev/nvme1n1}
```
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from forebay.storage.errors import ConfigError
from forebay.storage.units import format_bytes, parse_bytes, parse_seconds

Size = Annotated[int, BeforeValidator(parse_bytes)]
Seconds = Annotated[float, BeforeValidator(parse_seconds)]

BLOCK = 4096
"""Device space is handed out in multiples of this (bytes)."""

ENV_PREFIX = "FOREBAY_"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DeviceConfig(_Strict):
    """One device of the pool."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """Unique in the pool; labels metrics and log lines."""
    kind: Literal["dram", "file", "spdk"]
    """`dram`: memory of this host. `file`: a preallocated file or a raw block device. `spdk`: a drive behind a
    vhost-user-blk socket, as `forebay spdk attach` makes them."""
    size: Size | None = None
    """Bytes, over all ranks together. Required except for a whole drive, where it defaults to all of it."""
    path: Path | None = None
    """The file or block device, or the socket of an `spdk` device."""
    numa_node: int | None = Field(default=None, ge=0)
    """Bind a `dram` region to this NUMA node."""
    huge_pages: bool = True
    """Try 2 MiB pages for a `dram` region, then fall back to 4 KiB pages."""
    buffered: bool = False
    """Allow the page cache where O_DIRECT is refused (kind `file`)."""
    engine: Literal["auto", "io_uring", "threads"] = "auto"
    """How a `file` is accessed: io_uring, or preadv/pwritev on threads. `auto` prefers io_uring."""
    depth: int = Field(default=32, ge=1, le=1024)
    """Operations in flight at once."""

    @model_validator(mode="after")
    def _fits_kind(self) -> Self:
        if self.kind == "dram":
            if self.size is None:
                raise ValueError(f"device {self.name!r} (dram) needs a size, for example `size: 4GiB`")
            if self.path is not None:
                raise ValueError(f"device {self.name!r} (dram) takes no path; remove it or use `kind: file`")
        example = {"file": "/mnt/nvme0/forebay.kv", "spdk": "/var/tmp/nvme0.kv"}.get(self.kind)
        if example and self.path is None:
            raise ValueError(f"device {self.name!r} ({self.kind}) needs a path, for example `path: {example}`")
        return self


class Watermarks(_Strict):
    """When the evictor starts and stops, as fractions in use of all devices together.

    In a durable pool memory and the persistent devices count apart: memory is relieved by reading from the copies.
    """

    high: float = Field(default=0.98, gt=0, le=1)
    low: float = Field(default=0.95, gt=0, le=1)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"watermarks: low ({self.low}) must not be above high ({self.high})")
        return self


class FaultPolicy(_Strict):
    """What happens when a device misbehaves."""

    deadline: Seconds = Field(default=10.0, gt=0)
    """A load or store that is not done after this fails."""
    errors: int = Field(default=3, ge=1)
    """Consecutive failed operations before a device is quarantined."""
    probation: Seconds = Field(default=30.0, gt=0)
    """How long a quarantined device is left alone before it is tried again."""


class PoolConfig(_Strict):
    """The whole pool."""

    path: Path
    """Folder of the journal, the bandwidth profile and the lock."""
    devices: tuple[DeviceConfig, ...] = Field(min_length=1, max_length=64)
    stripe: Size = 512 * 1024
    """Largest stripe, and the size of a slot on every device (bytes, a multiple of 4096)."""
    placement: Literal["bandwidth", "equal", "hash", "tiered", "single"] = "bandwidth"
    """How stripes are spread. All but `bandwidth` exist for comparison."""
    policy: Literal["lru", "s3fifo"] = "lru"
    """Eviction order."""
    verify: bool = True
    """Check the CRC-32C of every stripe on load. After an unclean stop, recovered chunks are checked regardless."""
    durable: bool = True
    """Keep a copy on a persistent device of what lies in DRAM, so that a restart finds everything warm."""
    load: Literal["when_faster", "always"] = "when_faster"
    """What of a hit is loaded: as much as shortens the time to first token, or all of it."""
    layer_groups: int = Field(default=1, ge=1, le=256)
    """A chunk is striped in this many groups of layers, each over all devices."""
    watermarks: Watermarks = Watermarks()
    faults: FaultPolicy = FaultPolicy()
    max_pending_store: Size = 1 << 30
    """Bytes of stores that may be outstanding; beyond it new stores are dropped, never loads."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [device.name for device in self.devices]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"device name {repeated[0]!r} is used twice; give every device its own name")
        if self.stripe % BLOCK or not BLOCK <= self.stripe <= 64 << 20:
            raise ValueError(f"stripe is {self.stripe} bytes; it must be a multiple of 4KiB between 4KiB and 64MiB")
        for device in self.devices:
            if device.size is not None and device.size < self.stripe:
                raise ValueError(
                    f"device {device.name!r} has size {format_bytes(device.size)}, less than one stripe "
                    f"({format_bytes(self.stripe)}); make it larger"
                )
        return self

    @property
    def journal_path(self) -> Path:
        return self.path / "journal"

    @property
    def profile_path(self) -> Path:
        return self.path / "profile.json"

    @property
    def lock_path(self) -> Path:
        return self.path / "lock"


def load_config(
    source: PoolConfig | Mapping[str, Any] | str | Path, env: Mapping[str, str] | None = None
) -> PoolConfig:
    """Read a pool configuration.

    Args:
        source: a mapping, the path of a YAML or JSON file, or a ready `PoolConfig`. Relative paths in a file
            are relative to that file.
        env: environment; `FOREBAY_VERIFY=false` or `FOREBAY_FAULTS__DEADLINE=5s` override top-level or nested keys.

    Raises:
        ConfigError: one line that names the key, the value and the fix.
    """
    if isinstance(source, PoolConfig):
        return source
    base = Path.cwd()
    origin = "pool configuration"
    if isinstance(source, str | Path):
        origin = str(source)
        data = _read_file(Path(source))
        base = Path(source).resolve().parent
    else:
        data = dict(source)
    data = _with_environment(data, os.environ if env is None else env)
    try:
        config = PoolConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{origin}: {_one_line(error)}") from None
    return _absolute(config, base)


def _read_file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); give the path of a pool.yaml") from None
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}: not valid YAML{where}: {getattr(error, 'problem', error)}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected keys such as `path:` and `devices:`, found {type(data).__name__}")
    return data


def _with_environment(data: dict[str, Any], env: Mapping[str, str]) -> dict[str, Any]:
    """Values from `FOREBAY_KEY` and `FOREBAY_KEY__SUBKEY`, parsed as YAML scalars, win over the file."""
    result = dict(data)
    for name, value in env.items():
        parts = name.removeprefix(ENV_PREFIX).lower().split("__")
        if not name.startswith(ENV_PREFIX) or parts[0] not in PoolConfig.model_fields or parts[0] == "devices":
            continue
        target = result
        for part in parts[:-1]:
            target[part] = dict(target.get(part) or {})
            target = target[part]
        target[parts[-1]] = yaml.safe_load(value)
    return result


def _absolute(config: PoolConfig, base: Path) -> PoolConfig:
    devices = tuple(
        device if device.path is None else device.model_copy(update={"path": base / device.path.expanduser()})
        for device in config.devices
    )
    return config.model_copy(update={"path": base / config.path.expanduser(), "devices": devices})


def _one_line(error: ValidationError) -> str:
    """The first problem as `key: what is wrong`, with the allowed keys when a key is unknown."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"]) or "top level"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        model: type[BaseModel] = DeviceConfig if first["loc"][0] == "devices" else PoolConfig
        nested: dict[str, type[BaseModel]] = {"watermarks": Watermarks, "faults": FaultPolicy}
        model = nested.get(str(first["loc"][0]), model)
        return f"{where}: unknown key; known keys are {', '.join(model.model_fields)}"
    value = first.get("input")
    shown = (
        ""
        if isinstance(value, dict | list) or message.startswith("device ")
        else f" (got {json.dumps(value, default=str)})"
    )
    return f"{where}: {message}{shown}"
