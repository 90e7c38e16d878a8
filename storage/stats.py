"""The pool in numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceUsage:
    """One device, all lanes together."""

    name: str
    kind: str
    capacity_bytes: int
    used_bytes: int
    quarantined: bool
    reason: str
    read_bandwidth: float
    """What placement assumes (bytes/s)."""


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Counters since the pool was opened, and how it stands."""

    devices: tuple[DeviceUsage, ...]
    chunks: int
    """Of all namespaces, those being written included."""
    writing: int
    leases: int
    pending_store_bytes: int
    lookups: int
    hits: int
    stored: int
    failed_stores: int
    dropped_stores: int
    """Chunks not stored because too much was being written or no space could be freed."""
    failed_loads: int
    evictions: int
    demotions: int
    """Chunks that lost their place in memory and are read from their copies."""
    recovered: int
    """Chunks that the last restart found."""
    lost: int
    """Chunks that it did not."""
    recovery_seconds: float
    journal_bytes: int
    journal_problem: str
    """Why the pool is not durable at present; empty when all is well."""
