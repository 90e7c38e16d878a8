"""The measurements of a diffusion model for a GPU, run on the CPU with a tiny model: all that needs no CUDA."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import typer

from forebay.bench import gpu_dlm
from forebay.bench.dlm import gpu_profile, gpu_run, gpu_speed
from forebay.bench.dlm.arms import ARMS, BICACHE, DUAL, INTRA, NONE
from forebay.bench.dlm.gpu_check import cases
from forebay.bench.dlm.gpu_floor import weight_bytes
from forebay.bench.dlm.gpu_plan import Plan, plan, tiny
from forebay.bench.dlm.gpu_table import show
from forebay.bench.moe.gpu_clock import Budget, OutOfTime

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")


def small(**changes: object) -> Plan:
    return replace(tiny(CPU), arms=(NONE, INTRA, DUAL, BICACHE), rounds=1, engines={}, **changes)


# Without a GPU


def test_no_gpu_is_one_line_and_code_2(tmp_path):
    path = tmp_path / "result.json"
    command = [sys.executable, "-m", "forebay.bench.gpu_dlm", "--out", str(path)]
    done = subprocess.run(command, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "finds no GPU" in done.stderr
    assert "--cpu" in done.stderr
    assert not path.exists()


def test_a_card_that_is_too_small_or_old_is_one_line():
    assert "compute capability 7.5; 8.0 is needed" in gpu_dlm.too_small("T4", (7, 5), 80 << 30)
    assert "10.0 GiB free; 22." in gpu_dlm.too_small("A10", (8, 6), 10 << 30)
    assert gpu_dlm.too_small("H200", (9, 0), 100 << 30) == ""


def test_a_file_that_cannot_be_written_is_found_before_measuring(tmp_path, capsys):
    with pytest.raises(typer.Exit) as ended:
        gpu_dlm.main(tmp_path / "none" / "x.json", minutes=10, quick=False, cpu=True)
    assert ended.value.exit_code == 2
    assert capsys.readouterr().err.startswith("error: --out ")


def test_a_gpu_that_fails_at_once_is_one_line(monkeypatch, capsys):
    def fail() -> str:
        raise RuntimeError("CUDA error:\nbusy")

    monkeypatch.setattr(gpu_dlm, "missing", fail)
    with pytest.raises(typer.Exit) as ended:
        gpu_dlm.main(None, minutes=10, quick=False, cpu=False)
    assert ended.value.exit_code == 1
    assert capsys.readouterr().err == "error: CUDA error: busy\n"


# The whole run


def test_the_command_writes_json_and_prints_markdown(tmp_path, monkeypatch, capsys):
    from forebay.bench.dlm import gpu_plan

    monkeypatch.setattr(gpu_plan, "tiny", lambda device: small())
    with pytest.raises(typer.Exit) as ended:
        gpu_dlm.main(tmp_path / "x.json", minutes=10, quick=False, cpu=True)
    assert ended.value.exit_code == 0
    report = json.loads((tmp_path / "x.json").read_text())
    assert (report["ok"], report["errors"], report["left_out"]) == (True, {}, [])
    assert report["command"].startswith("python -m forebay.bench.gpu_dlm")
    assert [(row["prefix"], row["arm"]) for row in report["rows"]] == [
        (prefix, arm) for prefix in (12, 40) for arm in ("none", "intra", "fast_dllm_dual", "bicache")
    ]
    assert [row["arm"] for row in report["batches"]] == ["bicache", "bicache_dual"]
    assert [row["pass"] for row in report["passes"]] == list(gpu_profile.KINDS)
    text = capsys.readouterr().out
    assert text.startswith("### CPU\n")
    assert text.count("| bicache |") == 3
    assert all(line.endswith("|") for line in text.splitlines() if line.startswith("|"))


def test_rows_compare_arms_of_one_prefix():
    report = gpu_run.run(small(), Budget(100))
    for row in report["rows"]:
        (none,) = (one for one in report["rows"] if (one["prefix"], one["arm"]) == (row["prefix"], "none"))
        assert row["vs_none"] == none["seconds"]["median"] / row["seconds"]["median"]
        assert row["of_floor"] == row["floor_seconds"] / row["seconds"]["median"]
        assert row["tokens_per_second"] == 24 / row["seconds"]["median"]


def test_without_time_everything_is_left_out_and_said():
    report = gpu_run.run(small(), Budget(0))
    assert report["ok"]
    assert report["rows"] == []
    assert report["left_out"][0] == "rates of the card"
    assert "P 40, bicache, 3 requests, 3 at a time, round 1 of 1" in report["left_out"]
    assert "Left out: rates of the card; weights;" in show(report)


def test_a_cell_that_would_end_too_late_is_not_begun():
    cells = gpu_speed.Cells(Budget(10))
    with pytest.raises(OutOfTime):
        cells.take("a", 6.0, lambda: 1.0)
    cells.take("a", 1.0, lambda: 11.0)
    with pytest.raises(OutOfTime):
        cells.take("a", 1.0, lambda: 1.0)
    assert cells.median("a") == 11.0
    assert cells.median("b") is None


def test_an_error_is_told_and_the_rest_goes_on(monkeypatch):
    def refuse(*arguments: object) -> float:
        raise RuntimeError("out of\nmemory")

    monkeypatch.setattr(gpu_run, "serve", refuse)
    report = gpu_run.run(small(), Budget(100))
    assert not report["ok"]
    assert len(report["rows"]) == 8
    assert set(report["errors"].values()) == {"RuntimeError: out of memory"}
    assert "ERROR: P 40, bicache, 3 requests, 1 at a time, round 1 of 1: RuntimeError: out of memory" in show(report)


def test_a_lost_gpu_ends_the_run(monkeypatch):
    def refuse(*arguments: object) -> None:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(gpu_run, "profile", refuse)
    monkeypatch.setattr(gpu_run, "is_lost", lambda device: True)
    report = gpu_run.run(small(), Budget(100))
    assert len(report["errors"]) == 1
    assert all("the GPU answers no more" in one for one in report["left_out"])


def test_the_plan_is_that_of_the_issue():
    full, quick = (plan(torch.device("cuda"), quick) for quick in (False, True))
    assert (full.prefixes, quick.prefixes, full.rounds, quick.rounds) == ((500, 1450, 4000), (500, 1450), 3, 1)
    assert full.arms == ARMS
    assert full.shared in quick.prefixes
    assert (full.config.layers, full.config.hidden, full.config.head_size) == (32, 4096, 128)
    assert 16.0e9 < weight_bytes(full.config, 2) < 16.2e9
    every = [str(case) for case in cases(full.engines)]
    assert len(set(every)) == len(every) == 5 * 6
    assert not any("varlen" in name and "float32" in name for name in every)


def test_the_table_shows_what_a_gpu_adds():
    report = gpu_run.run(small(), Budget(0))
    gpu = {
        "prefix": 40, "pass": "block", "seconds": 4e-3, "floor_seconds": 3e-3, "bound_by": "bytes",
        "kernel_seconds": 3.5e-3, "kernels": 900, "idle_share": 0.125, "host_waits": {"diffusion/decoding.py:178": 2},
        "longest": [{"name": "gemm|tile", "seconds": 2e-3, "count": 64}],
    }  # fmt: skip
    card = {"name": "NVIDIA X", "memory_bytes": 1 << 37, "compute_capability": "9.0", "versions": {"torch": "2"}}
    text = show(report | {"passes": [gpu], "card": card, "checks": [{"ok": False, "case": "attention"}]})
    assert text.startswith("### NVIDIA X\n\n128 GiB, compute capability 9.0; torch 2.")
    assert "| 40 | block | 4.00 | 3.00 | bytes | 3.50 | 900 | 12% | gemm/tile: 2.00 |" in text
    assert "Host waits in a pass (block): diffusion/decoding.py:178 (2)." in text
    assert "WRONG: {'ok': False, 'case': 'attention'}" in text
