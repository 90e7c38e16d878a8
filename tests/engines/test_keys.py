"""Keys are right for groups, chunk sizes, adapters, revisions and restarts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.harness import BLOCK, MODEL, baseline, prompt
from tests.engines.isolated import run_isolated
from tests.engines.models import adapter, dense_model, revised_model, sliding_window_model

pytestmark = pytest.mark.engine


def test_several_kv_cache_groups(tmp_path: Path) -> None:
    model = sliding_window_model(tmp_path / "model")
    result = run_isolated("two_groups", {"folder": str(tmp_path), "model": str(model), "seeds": [1, 2]})
    assert result["groups"] > 1
    expected = baseline([prompt(seed, blocks=7) for seed in (1, 2)], model=str(model))
    for name in ("cold", "warm", "failing", "again"):
        assert [answer for answer, _ in result[name]] == expected, name
    assert [cached for _, cached in result["cold"]] == [0, 0]
    assert [cached for _, cached in result["warm"]] == [7 * BLOCK] * 2
    assert result["leases"] == 0


def test_chunks_of_several_blocks_in_layer_groups(tmp_path: Path) -> None:
    result = run_isolated("chunks_of_blocks", {"folder": str(tmp_path), "seeds": [3, 4]})
    assert [answer for answer, _ in result["warm"]] == [answer for answer, _ in result["cold"]]
    assert [cached for _, cached in result["warm"]] == [9 * BLOCK] * 2


def test_two_ranks(tmp_path: Path) -> None:
    result = run_isolated("two_ranks", {"folder": str(tmp_path), "seeds": [8]})
    assert result["lanes"] == 2
    assert [cached for _, cached in result["warm"]] == [3 * BLOCK]
    assert [answer for answer, _ in result["warm"]] == [answer for answer, _ in result["cold"]]
    assert result["leases"] == 0


def test_adapters_are_known_by_their_content(tmp_path: Path) -> None:
    model = dense_model(tmp_path / "model")
    first, second = (str(adapter(tmp_path / f"source-{seed}", model, seed)) for seed in (1, 2))
    arguments = {"folder": str(tmp_path), "model": str(model), "first": first, "second": second, "seed": 5}
    result = run_isolated("adapters", arguments)
    assert result["first"][1] == result["second"][1] == result["none"][1] == 0
    assert result["first again"] == [result["first"][0], 8 * BLOCK]
    assert result["second again"] == [result["second"][0], 8 * BLOCK]
    assert result["first"][0] != result["second"][0]
    assert result["leases"] == 0


def test_restart_revision_and_changed_devices(tmp_path: Path) -> None:
    def life(model: Path = MODEL, **changes: object) -> dict[str, list[list[object]]]:
        arguments = {"folder": str(tmp_path), "model": str(model), "seeds": [6, 7], "changes": changes}
        result: dict[str, list[list[object]]] = run_isolated("one_life", arguments)
        return result

    first = life()
    second = life()
    assert [cached for _, cached in second["answers"]] == [8 * BLOCK] * 2
    assert [answer for answer, _ in second["answers"]] == [answer for answer, _ in first["answers"]]
    revised = life(revised_model(tmp_path / "revised" / MODEL.name))
    assert [cached for _, cached in revised["answers"]] == [0, 0]
    ssd = {"name": "ssd0", "kind": "file", "path": f"{tmp_path}/ssd0.kv", "size": "64MiB", "buffered": True}
    more = {**ssd, "name": "ssd1", "path": f"{tmp_path}/ssd1.kv"}
    without_memory = life(devices=[ssd, more])
    assert [cached for _, cached in without_memory["answers"]] == [8 * BLOCK] * 2
    other_stripe = life(devices=[ssd, more], stripe="128KiB")
    assert [cached for _, cached in other_stripe["answers"]] == [0, 0]
    assert [answer for answer, _ in other_stripe["answers"]] == [answer for answer, _ in first["answers"]]
