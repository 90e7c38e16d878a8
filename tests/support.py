"""What tests of several folders need."""

from __future__ import annotations

import os

import pytest


def require(condition: bool, reason: str) -> None:
    """Skip unless `condition` holds; where CI=true a skip is a failure."""
    if condition:
        return
    if os.environ.get("CI") == "true":
        pytest.fail(f"{reason} (CI=true does not skip)", pytrace=False)
    pytest.skip(reason)
