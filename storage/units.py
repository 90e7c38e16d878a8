"""Sizes, times and rates with units, in and out."""

from __future__ import annotations

import re

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kmgtp]?)(i?)b?\s*$", re.IGNORECASE)
_TIME = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(us|ms|s|m|h)?\s*$")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, None: 1.0}


def parse_bytes(value: object) -> object:
    """`"4GiB"` -> 4294967296, `"1.5MB"` -> 1500000; numbers pass through.

    Raises:
        ValueError: for text that is not a size.
    """
    if not isinstance(value, str):
        return value
    match = _SIZE.match(value)
    if match is None:
        raise ValueError(f"{value!r} is not a size; write for example 512KiB, 4GiB or 100GB")
    number, prefix, binary = match.groups()
    base = 1024 if binary else 1000
    return int(float(number) * base ** " kmgtp".index(prefix.lower() or " "))


def parse_seconds(value: object) -> object:
    """`"500ms"` -> 0.5, `"2m"` -> 120.0; numbers pass through as seconds.

    Raises:
        ValueError: for text that is not a time.
    """
    if not isinstance(value, str):
        return value
    match = _TIME.match(value)
    if match is None:
        raise ValueError(f"{value!r} is not a time; write for example 500ms, 10s or 2m")
    return float(match[1]) * _SECONDS[match[2]]


def format_bytes(count: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def format_rate(bytes_per_second: float) -> str:
    """2.1e9 -> '2.10 GB/s' (decimal, as drives and fio are rated)."""
    for scale, unit in ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s")):
        if bytes_per_second >= scale:
            return f"{bytes_per_second / scale:.2f} {unit}"
    return f"{bytes_per_second:.0f} B/s"
