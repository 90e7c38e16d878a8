"""One engine for all tests of a session: starting one takes longer than most tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.engines.harness import PoolEngine, baseline, prompt

PROMPTS = [prompt(seed) for seed in range(6)]


@pytest.fixture(scope="session")
def answers() -> list[list[int]]:
    """What an engine without a pool says to `PROMPTS`."""
    return baseline(PROMPTS)


@pytest.fixture(scope="session")
def session_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolEngine]:
    folder = tmp_path_factory.mktemp("pool")
    pool: dict[str, Any] = {
        "path": str(folder / "state"),
        "stripe": "64KiB",
        "devices": [
            {"name": "ram", "kind": "dram", "size": "8MiB", "huge_pages": False},
            {"name": "ssd0", "kind": "file", "path": str(folder / "ssd0.kv"), "size": "32MiB", "buffered": True},
            {"name": "ssd1", "kind": "file", "path": str(folder / "ssd1.kv"), "size": "32MiB", "buffered": True},
        ],
        "faults": {"deadline": "1s", "errors": 3, "probation": "500ms"},
        "load": "always",  # also from devices that were just made to fail; what is worth loading has tests of its own
    }
    engine = PoolEngine(pool)
    yield engine
    engine.close()


@pytest.fixture
def engine(session_engine: PoolEngine) -> Iterator[PoolEngine]:
    """The shared engine with an empty pool and healthy devices; afterwards nothing may be left on its way."""
    session_engine.recover()
    session_engine.reset_pool()
    yield session_engine
    session_engine.recover()
    session_engine.settle()
    assert session_engine.leases() == 0
