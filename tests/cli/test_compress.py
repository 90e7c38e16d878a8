"""`forebay compress` as a user runs it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MODEL = str(ROOT / "tests/assets/tinymoe-qwen3-8m")
FAST = ("--text", str(ROOT / "docs"), "--sequences", "16", "--length", "128", "--layers", "last:1")


@pytest.mark.timeout(600)
def test_from_model_to_model(forebay: Callable[..., Any], tmp_path: Path) -> None:
    made = forebay("compress", MODEL, "--out", "small", *FAST, "--rho", "0.8")
    assert made.code == 0, made.err
    assert "410 of 2,048" in made.out
    assert "whole model: 15.5 MiB -> " in made.out
    seen = forebay("compress", "inspect", "small", "--json", "--plot", "kept.png")
    assert [layer["kept"] for layer in seen.data["layers"]] == [410]
    assert seen.data["bytes"] < seen.data["dense_bytes"]
    assert (tmp_path / "kept.png").read_bytes().startswith(b"\x89PNG")
    assert "all sound" in forebay("compress", "verify", "small").out
    assert forebay("compress", "restore", "small", "--out", "dense").code == 0
    assert "quantization_config" not in json.loads((tmp_path / "dense/config.json").read_text())
    again = forebay("compress", "run", MODEL, "--out", "small", *FAST)
    assert again.code == 1
    assert again.err == "error: small exists already; give another folder with --out, or remove it\n"


def test_int8_backbones(forebay: Callable[..., Any]) -> None:
    plain = forebay("compress", MODEL, "--out", "small", *FAST, "--dry-run", "--json")
    made = forebay("compress", MODEL, "--out", "small", *FAST, "--backbone-dtype", "int8")
    assert made.code == 0, made.err
    assert made.out.endswith("rho 0.9, int8 backbones\n")
    seen = forebay("compress", "inspect", "small", "--json")
    assert seen.data["backbone_dtype"] == "int8"
    assert plain.data["bytes"] - seen.data["bytes"] == 3 * 128 * 256 - 4 * (2 * 128 + 256)
    assert "all sound" in forebay("compress", "verify", "small").out


def test_a_budget(forebay: Callable[..., Any]) -> None:
    told = forebay("compress", MODEL, "--out", "small", *FAST, "--memory-budget", "13MiB", "--dry-run")
    assert told.code == 0
    assert "-> 13.0 MiB" in told.out
    short = forebay("compress", MODEL, "--out", "small", *FAST, "--memory-budget", "3MiB", "--dry-run")
    assert short.code == 1
    assert short.err.startswith("error: --memory-budget 3.00 MiB is below the 1")


def test_dry_run_writes_nothing(forebay: Callable[..., Any], tmp_path: Path) -> None:
    before = set(tmp_path.iterdir())
    told = forebay("compress", "run", MODEL, "--out", "small", *FAST, "--dry-run", "--json")
    assert told.code == 0
    assert told.data["bytes"] < told.data["dense_bytes"]
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--backbone", "median"), "--backbone 'median' is not barycenter or mean"),
        (("--backbone-dtype", "fp8"), "--backbone-dtype 'fp8' is not model or int8"),
        (("--backbone-dtype", "fp4"), "--backbone-dtype 'fp4' is not model or int8"),
        (
            ("--rho", "0.5", "--memory-budget", "1GiB"),
            "--rho 0.5 and --memory-budget 1GiB both say how much to keep; give one",
        ),
        (
            ("--memory-budget", "much"),
            "--memory-budget: 'much' is not a size; write for example 512KiB, 4GiB or 100GB",
        ),
        (("--layers", "9"), "--layers 9: layer 9 has no routed experts; those that have: 0-3"),
        (("--text", "absent"), "calibration text absent does not exist; give a file or a folder with --text"),
    ],
)
def test_mistakes_are_one_line(forebay: Callable[..., Any], arguments: tuple[str, ...], message: str) -> None:
    done = forebay("compress", MODEL, "--out", "small", *FAST, *arguments)
    assert done.code == 1
    assert done.err == f"error: {message}\n"


def test_a_plain_model_is_no_compressed_one(forebay: Callable[..., Any]) -> None:
    done = forebay("compress", "verify", MODEL)
    assert done.code == 1
    assert done.err == "error: quant_method is None, not 'parser': this is no checkpoint of forebay compress\n"
