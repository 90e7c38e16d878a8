"""Drives behind SPDK, against the kernel's file systems: `forebay bench passthrough`."""
