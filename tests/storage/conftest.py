"""Pools that are closed when the test ends."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.storage.poolkit import Pools

settings.register_profile("forebay", deadline=None)  # a busy machine is no failure
settings.load_profile("forebay")


@pytest.fixture
def pools(tmp_path: Path) -> Iterator[Pools]:
    made = Pools(tmp_path)
    yield made
    made.close()


@pytest.fixture
def memory_pools() -> Iterator[Pools]:
    """Pools whose files lie in memory, where an fsync costs nothing: for hundreds of restarts."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None) as folder:
        made = Pools(Path(folder))
        yield made
        made.close()
