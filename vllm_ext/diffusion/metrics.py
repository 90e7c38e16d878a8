"""What of the runtime's numbers is shown at /metrics."""

from __future__ import annotations

from forebay.diffusion.runtime import Runtime


def counts(runtime: Runtime) -> dict[str, float]:
    """The runtime's numbers since it was made."""
    return {}
