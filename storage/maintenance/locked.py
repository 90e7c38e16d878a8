"""Keeping engines out of a pool for as long as something is done to it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from forebay.storage.config import PoolConfig
from forebay.storage.opening import lock_pool


@contextlib.contextmanager
def locked(config: PoolConfig) -> Iterator[None]:
    """Own the pool inside the block.

    Raises:
        PoolBusyError: an engine uses it.
        PoolError: its folder cannot be written.
    """
    lock = lock_pool(config)
    try:
        yield
    finally:
        os.close(lock)
