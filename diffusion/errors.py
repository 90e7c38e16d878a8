"""What goes wrong with a diffusion model, in one line each: the value, the limit and the fix."""

from __future__ import annotations


class DiffusionError(Exception):
    """Base of every error that the diffusion runtime raises on purpose."""


class ModelError(DiffusionError):
    """The folder holds no diffusion model that can be run."""
