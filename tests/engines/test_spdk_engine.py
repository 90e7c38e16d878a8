"""Real vLLM on a drive behind QEMU's storage daemon: warm is found, and its faults cost time and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engines.harness import BLOCK
from tests.engines.isolated import run_isolated
from tests.storage.device.vhost import huge_pages

pytestmark = [pytest.mark.engine, pytest.mark.needs("root", "qemu-storage-daemon")]
WARM = 8 * BLOCK


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = str(tmp_path_factory.mktemp("spdk"))
    with huge_pages(24):
        result: dict[str, Any] = run_isolated("daemon_comes_and_goes", {"folder": folder}, module="spdk_scripts")
    return result


def test_what_was_stored_is_found(found: dict[str, Any]) -> None:
    assert [cached for _, cached in found["cold"]] == [0] * 4
    assert [cached for _, cached in found["warm"]] == [WARM] * 4
    assert [cached for _, cached in found["warm again"]] == [WARM] * 4


@pytest.mark.parametrize("state", ["warm", "frozen", "dead", "still dead", "back", "warm again"])
def test_answers_are_the_computed_ones(found: dict[str, Any], state: str) -> None:
    assert [answer for answer, _ in found[state]] == [answer for answer, _ in found["cold"]]


def test_nothing_stays_leased(found: dict[str, Any]) -> None:
    assert found["leases"] == 0
