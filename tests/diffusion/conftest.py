"""One thread for all of these tests."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def always_one_thread(one_thread: None) -> None:
    """See `one_thread`."""
