"""Benchmarks and demonstrations: each runs by name, peers in the same run. Nothing here is needed to serve."""
