"""The measurements for a GPU, run on the CPU: every step that needs no CUDA, and the Triton kernels in the interpreter.

Triton reads TRITON_INTERPRET when it is imported, so what needs it runs in a process of its own.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from forebay.bench import gpu_report
from forebay.bench.moe import gpu_clock, gpu_dense, gpu_run, gpu_times
from forebay.bench.moe.gpu_card import Need, Roof
from forebay.bench.moe.gpu_check import Case, cases, check, exact, worst
from forebay.bench.moe.gpu_clock import Budget, moved
from forebay.bench.moe.layer import Routed, Sizes, random_weights, route
from forebay.kernels.parser_moe import reference
from forebay.kernels.parser_moe.ops import parser_moe
from forebay.storage.errors import ForebayError
from tests.bench.gpu_plans import CPU, SMALL, TORCH_ARMS, plan, text_of

ROOT = Path(__file__).parents[2]


# Without a GPU


def test_no_gpu_is_one_line_and_code_2(tmp_path):
    path = tmp_path / "result.json"
    command = [sys.executable, "-m", "forebay.bench.gpu_moe", "--json", str(path)]
    done = subprocess.run(command, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "finds no GPU" in done.stderr
    assert not path.exists()


# The whole run


@pytest.fixture(scope="module")
def finished():
    saved = []
    seen = []
    report = gpu_run.run(
        plan(),
        Budget(100),
        save=lambda report: saved.append(json.dumps(report)),
        progress=lambda *step: seen.append(step),
    )
    return report, saved, seen


def test_a_run_finds_everything_right(finished):
    report, saved, seen = finished
    assert report["errors"] == {}
    assert report["ok"]
    assert [one["ok"] for one in report["checks"]] == [True, True]
    assert [(row["layer"], row["tokens"]) for row in report["rows"]] == [
        (name, tokens) for name in ("small", "other") for tokens in (1, 70)
    ]
    assert report["left_out"] == []
    assert [number for number, total, _ in seen] == list(range(7))
    assert len(saved) == 8
    assert saved[-1] == json.dumps(report)


def test_a_row_has_the_floors_and_what_was_reached(finished):
    report, _, _ = finished
    row, roof = report["rows"][0], report["roof"]
    assert row["dense"] in TORCH_ARMS
    for arm in row["arms"].values():
        floor = max(arm["bytes"] / roof["bytes_per_second"], arm["operations"] / roof["operations_per_second"])
        assert arm["floor_seconds"] == floor
        assert arm["bytes_per_second"] == arm["bytes"] / arm["seconds"]["median"]
        assert len(arm["seconds"]["rounds"]) == 2
    assert row["ratio"] == row["arms"]["dense"]["seconds"]["median"] / row["arms"]["forebay"]["seconds"]["median"]


def test_the_table_has_every_row(finished):
    report, _, _ = finished
    text = text_of(report)
    assert "correct: 2 of 2 checks" in text
    assert text.count("small") == 2
    assert text.count("other") == 2
    assert "dense / forebay" in text


def test_without_time_everything_is_left_out_and_said():
    report = gpu_run.run(plan(), Budget(0))
    assert len(report["left_out"]) == 7
    assert report["ok"]
    assert "left out: rates of the card; check: T 1, K 4, bfloat16, silu" in text_of(report)


def test_time_that_ends_within_a_row_leaves_that_row_out(monkeypatch):
    budget = Budget(100)

    def late(*arguments):
        budget.ends = 0
        return 1.0

    monkeypatch.setattr(gpu_clock.Clock, "seconds", late)
    roof = asdict(Roof(1e9, 1e9))
    report = {"rows": [], "roof": roof, "left_out": [], "errors": {}, "dense_passed_over": {}}
    for name, step in list(gpu_run.steps(plan(cases=()), budget, report))[1:]:
        gpu_run.take_step(name, step, budget, report)
    assert report["rows"] == []
    assert report["left_out"][0] == "small, 1 tokens"


def test_wrong_numbers_and_failing_steps_are_told():
    def wrong(x_TD, *rest):
        if x_TD.shape[0] == 8:
            raise RuntimeError("CUDA [error]: [/no] such thing")
        return reference.forward(x_TD, *rest) * 1.1

    report = gpu_run.run(plan(forward=wrong, models={"small": SMALL}, tokens=(1,)), Budget(100))
    assert not report["ok"]
    assert [one["ok"] for one in report["checks"]] == [False]
    assert [row["ok"] for row in report["rows"]] == [False]
    text = text_of(report)
    assert "RuntimeError: CUDA [error]: [/no] such thing" in text
    assert text.count("wrong") == 2


def test_a_lost_gpu_ends_the_run(monkeypatch):
    def broken(*arguments):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(gpu_run, "is_lost", lambda device: True)
    report = gpu_run.run(plan(forward=broken), Budget(100))
    assert list(report["errors"]) == ["check: T 1, K 4, bfloat16, silu"]
    assert len(report["left_out"]) == 5
    assert "answers no more" in report["left_out"][0]


# Its parts


def test_need_counts_each_expert_once_and_each_pair():
    sizes = Sizes(4, 2, 10, 8)
    ids = torch.tensor([[0, 1], [1, 3], [1, 0]], dtype=torch.int32)
    batch = Routed(torch.zeros(3, 8, dtype=torch.bfloat16), torch.ones(3, 2), ids)
    found = gpu_times.need(sizes, torch.tensor([1, 2, 4, 8]), 10, [batch, batch])
    assert found.bytes == 2 * (3 * 8 * (10 + 1 + 2 + 8) + 2 * 3 * 8)
    assert found.operations == 2 * 3 * 8 * (3 * 10 + 1 + 2 + 2 + 8 + 2 + 1)


def test_the_floor_is_the_longer_of_two():
    roof = Roof(bytes_per_second=10, operations_per_second=100)
    assert roof.floor(Need(50, 100)) == 5
    assert roof.floor(Need(5, 400)) == 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", TORCH_ARMS)
def test_ways_to_run_the_dense_layer_agree(name, dtype):
    random = torch.Generator().manual_seed(1)
    weights = random_weights(SMALL, torch.tensor([0, 3, 9, 160, 1, 20]), dtype, random)
    batch = route(40, SMALL, dtype, random)
    found = TORCH_ARMS[name](gpu_dense.rebuild(weights), batch)
    assert worst(found, exact(batch, weights, "silu")) < (2e-2 if dtype is torch.bfloat16 else 1e-5)


def test_the_dense_layer_falls_back_and_says_why():
    def absent(dense, batch):
        raise ImportError("no engine\nhere")

    random = torch.Generator().manual_seed(1)
    weights = random_weights(SMALL, torch.full((6,), 5), torch.float32, random)
    batch = route(4, SMALL, torch.float32, random)
    expected = exact(batch, weights, "silu")
    arms = {"absent": absent, "wrong": lambda dense, batch: batch.x_TD, "loop": gpu_dense.by_loop}
    name, _, reasons = gpu_dense.pick(arms, gpu_dense.rebuild(weights), batch, expected)
    assert name == "loop"
    assert reasons["absent"] == "ImportError: no engine here"
    assert reasons["wrong"].startswith("differs from the reference by ")
    with pytest.raises(ForebayError, match="no engine here"):
        gpu_dense.pick({"absent": absent}, gpu_dense.rebuild(weights), batch, expected)


def test_the_checks_cover_what_is_promised():
    every = cases((torch.bfloat16, torch.float16, torch.float32))
    assert {case.tokens for case in every} >= {1, 8, 64, 512}
    assert {case.dtype for case in every} == {torch.bfloat16, torch.float16, torch.float32}
    assert {case.activation for case in every} == set(reference.ACTIVATIONS)
    assert {case.tokens for case in every if case.int8} == {1, 64, 512}
    assert len({str(case) for case in every}) == len(every)


@pytest.mark.parametrize(
    "case",
    [Case(8, 4, torch.bfloat16), Case(64, 8, torch.float32, "gelu_tanh"), Case(64, 4, torch.bfloat16, int8=True)],
    ids=str,
)
def test_the_operator_passes_a_check(case):
    assert gpu_run.Plan.__dataclass_fields__["forward"].default is parser_moe
    assert check(case, CPU, parser_moe)["ok"]


def test_an_error_that_is_no_number_is_infinite():
    assert worst(torch.tensor([[math.nan]]), torch.ones(1, 1)) == math.inf
    assert worst(torch.zeros(2, 3), torch.zeros(2, 3)) == 0
    assert gpu_report.plain({"a": [math.inf, 1.5], "b": (math.nan,)}) == {"a": [None, 1.5], "b": [None]}


def test_moving_keeps_what_is_none():
    weights = random_weights(SMALL, torch.full((6,), 5), torch.float32, torch.Generator())
    copy = moved(weights, CPU)
    assert copy.gate_HD is not weights.gate_HD
    assert torch.equal(copy.gate_HD, weights.gate_HD)


# The Triton kernels


def test_checks_and_rows_with_the_triton_kernels():
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.gpu_plans"],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["errors"] == {}
    assert all(row["ok"] for row in [*found["checks"], *found["rows"]])
    kernels = {(row["kernel"], row["bucket"], row["layer"]) for row in found["blocks"]}
    assert kernels == {
        (kernel, bucket, "small")
        for kernel, bucket in (
            ("hidden_few", "up to 1 pairs"),
            ("down_few", "up to 1 pairs"),
            ("hidden_many", "blocks of 16 pairs"),
            ("down_many", "blocks of 16 pairs"),
        )
    }
