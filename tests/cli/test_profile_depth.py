"""`forebay profile-depth` as a user runs it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MODEL = str(ROOT / "tests/assets/tinydlm-prefix")
FAST = (MODEL, "--text", str(ROOT / "docs"), "--samples", "4", "--shares", "50,86")


def test_from_text_to_table(forebay: Callable[..., Any], tmp_path: Path) -> None:
    made = forebay("profile-depth", *FAST, "--plot", "depth.png")
    assert made.code == 0, made.err
    assert "forebay_depth.json: tinydlm-prefix, 6 layers, mean above 0.97" in made.out
    assert (tmp_path / "depth.png").read_bytes().startswith(b"\x89PNG")
    stored = json.loads((tmp_path / "forebay_depth.json").read_text())
    leading = [next((at for at, mean in enumerate(one["mean"]) if mean <= 0.97), 6) for one in stored["similarities"]]
    deepest = max(leading)
    assert max(stored["leading"].values()) == deepest
    ours = deepest if deepest == 6 else max(1, deepest - 1)
    assert [line.split()[:5] for line in made.out.splitlines()[2:3]] == [["86", "%", "4", str(deepest), str(ours)]]
    again = forebay("profile-depth", "--from", "forebay_depth.json", "--tau", "0.9", "--out", "other.json", "--json")
    assert again.data["ok"] is True
    assert max(again.data["leading"].values()) >= deepest
    assert again.data["similarities"] == stored["similarities"]
    strict = forebay("profile-depth", "--from", "forebay_depth.json", "--worst-tau", "0.99", "--out", "other.json")
    assert "mean above 0.97, least similar token above 0.99" in strict.out
    assert json.loads((tmp_path / "other.json").read_text())["leading"] == {"0": 1}


def test_dry_run_writes_nothing(forebay: Callable[..., Any], tmp_path: Path) -> None:
    before = set(tmp_path.iterdir())
    told = forebay("profile-depth", *FAST, "--dry-run")
    assert told.code == 0
    assert told.out.startswith("12 passes over ")
    assert forebay("profile-depth", *FAST, "--dry-run", "--json").data["passes"] == 12
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give a MODEL and --text PATH, or --from FILE"),
        ((MODEL,), "give a MODEL and --text PATH, or --from FILE"),
        ((*FAST, "--tau", "97"), "--tau 97: give a number between 0 and 1"),
        ((*FAST, "--shares", "all"), "--shares 'all': write for example 20,40,60 or 5-95:5"),
        ((*FAST, "--text", "absent"), "--text absent does not exist; give a file or a folder"),
        (("absent", "--text", "."), "absent/config.json: No such file or directory; give a Hugging Face model folder"),
        (("--from", "absent"), "absent: No such file or directory; give a file of `forebay profile-depth`"),
    ],
)
def test_mistakes_are_one_line(forebay: Callable[..., Any], arguments: tuple[str, ...], message: str) -> None:
    done = forebay("profile-depth", *arguments)
    assert done.code == 1
    assert done.err == f"error: {message}\n"
