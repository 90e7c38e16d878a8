"""The order in which chunks leave the pool, pluggable by name."""

from __future__ import annotations

from forebay.storage.policy.base import Policy
from forebay.storage.policy.lru import LRU
from forebay.storage.policy.s3fifo import S3FIFO

POLICIES: dict[str, type[Policy]] = {kind.name: kind for kind in (LRU, S3FIFO)}


def make_policy(name: str) -> Policy:
    """A new policy called `name` (a key of `POLICIES`)."""
    return POLICIES[name]()


__all__ = ["LRU", "POLICIES", "S3FIFO", "Policy", "make_policy"]
