"""What goes wrong in a compression, in one line each: the value, the limit and the fix."""

from __future__ import annotations


class CompressionError(Exception):
    """Base of every error that compression raises on purpose."""


class ModelError(CompressionError):
    """The model's folder is not one that can be compressed."""


class CalibrationError(CompressionError):
    """The calibration data does not suffice."""


class CheckpointError(CompressionError):
    """A compressed checkpoint is damaged or of another format."""
