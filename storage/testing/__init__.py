"""What tests of devices need, ours and other people's. Needs pytest and hypothesis."""

from forebay.storage.testing.conformance import DeviceConformance
from forebay.storage.testing.driving import Memory, run

__all__ = ["DeviceConformance", "Memory", "run"]
