"""The error hierarchy of the suite.

Every message a user can meet names the value, the limit and the fix, in one line.
"""

from __future__ import annotations


class ForebayError(Exception):
    """Base of every error that forebay raises on purpose."""


class ConfigError(ForebayError):
    """The configuration is wrong; the message quotes the key, the value and the fix."""


class DeviceError(ForebayError):
    """A device cannot be opened or used."""

    def __init__(self, device: str, problem: str, fix: str = "") -> None:
        self.device = device
        super().__init__(f"device {device!r}: {problem}" + (f"; {fix}" if fix else ""))


class PoolError(ForebayError):
    """The pool's files cannot be used as they are."""


class PoolBusyError(PoolError):
    """Another process owns the pool."""


class JournalError(PoolError):
    """The journal is not one of ours, or of a format we do not read."""
