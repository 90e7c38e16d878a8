"""What the measurements ask of a GPU, told to a card that is none; the choice of block sizes with invented times."""

from __future__ import annotations

import contextlib
import json
import math
import warnings

import pytest
import torch
import typer

from forebay.bench import gpu_moe, gpu_report
from forebay.bench.moe import gpu_clock, gpu_run, gpu_times
from forebay.bench.moe.gpu_card import describe
from forebay.bench.moe.gpu_clock import Budget
from forebay.bench.moe.gpu_tuning import Sweep, choosing, suggest
from forebay.kernels.parser_moe import reference, triton_tuning
from forebay.kernels.parser_moe.triton_tuning import Blocks
from tests.bench.gpu_plans import CPU, SMALL, plan, text_of


class Card:
    """What the measurements ask of torch.cuda."""

    def __init__(self, monkeypatch):
        self.asked = []
        self.refuses = False
        for name in ("set_sync_debug_mode", "synchronize"):
            monkeypatch.setattr(torch.cuda, name, lambda *mode, name=name: self.asked.append((name, *mode)))
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: self)
        monkeypatch.setattr(torch.cuda, "graph", self.graph)
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(self))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: self.capability)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: self)

    name, capability, major, minor, total_memory, multi_processor_count = "Card", (9, 0), 9, 0, 1 << 37, 132

    @contextlib.contextmanager
    def graph(self, graph):
        if self.refuses:
            raise RuntimeError("operation not permitted when stream is capturing")
        yield

    def replay(self):
        self.asked.append(("replay",))


class Event:
    """One that takes a millisecond after the one before."""

    def __init__(self, card):
        self.card = card

    def record(self):
        self.card.asked.append(("event",))
        self.number = len(self.card.asked)

    def synchronize(self):
        assert self.number

    def elapsed_time(self, later):
        return later.number - self.number


@pytest.fixture
def card(monkeypatch):
    return Card(monkeypatch)


def wait():
    raise RuntimeError("called a synchronizing CUDA operation")


def fail():
    raise RuntimeError("out of memory")


def test_a_call_that_waits_is_found_and_the_mode_is_left_as_it_was(card):
    assert not gpu_clock.waits(lambda: None)
    assert gpu_clock.waits(wait)
    with pytest.raises(RuntimeError, match="out of memory"):
        gpu_clock.waits(fail)
    assert card.asked == [("set_sync_debug_mode", "error"), ("set_sync_debug_mode", "default")] * 3


def test_graphs_are_launched_only_where_nothing_waits(card):
    cuda = torch.device("cuda")
    launches, kind = gpu_times.launched({"a": lambda: torch.ones(1)}, cuda)
    assert kind == "graphs"
    assert torch.equal(launches["a"](), torch.ones(1))
    assert card.asked[-1] == ("replay",)
    calls = {"a": lambda: torch.ones(1), "b": wait}
    assert gpu_times.launched(calls, cuda) == (calls, "calls, b waits for the GPU")
    card.refuses = True
    assert gpu_times.launched({"a": lambda: torch.ones(1)}, cuda)[1].startswith("calls, no graph: operation not")


def test_events_bracket_the_launch_alone(card):
    clock = gpu_clock.Clock(CPU)
    clock.cuda = True
    spent = clock.seconds(lambda: card.asked.append("launch"), [lambda: card.asked.append("prepare")] * 2)
    assert card.asked == ["prepare", ("event",), "launch", ("event",)] * 2
    assert spent == 2e-3


def test_the_plan_follows_the_card(card):
    full, quick = (gpu_run.plan(torch.device("cuda"), quick) for quick in (False, True))
    assert full.dtype is torch.bfloat16
    assert {case.dtype for case in full.cases} == {torch.bfloat16, torch.float16, torch.float32}
    assert (full.copied, len(full.models), full.tokens) == (1 << 30, 3, (1, 8, 64, 512, 4096))
    assert (list(quick.models), quick.tokens) == (["Qwen1.5-MoE"], (1, 8, 512))
    card.capability = (7, 5)
    old = gpu_run.plan(torch.device("cuda"), False)
    assert old.dtype is torch.float16
    assert torch.bfloat16 not in {case.dtype for case in old.cases}
    described = describe(torch.device("cuda"))
    assert (described["name"], described["compute_capability"]) == ("Card", "9.0")
    assert "Card, compute capability 9.0, 128 GiB" in text_of(gpu_run.run(plan(), Budget(0)) | {"card": described})


@pytest.mark.parametrize(("factor", "code"), [(1, 0), (1.1, 1)])
def test_the_command_writes_json_and_prints_the_table(tmp_path, monkeypatch, capsys, factor, code):
    def forward(*arguments):
        return reference.forward(*arguments) * factor

    monkeypatch.setattr(gpu_moe, "missing", lambda: "")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(gpu_run, "plan", lambda device, quick: plan(forward=forward, tokens=(1,)))
    with pytest.raises(typer.Exit) as ended:
        gpu_moe.main(tmp_path / "x.json", quick=True, seconds=100)
    assert ended.value.exit_code == code
    report = json.loads((tmp_path / "x.json").read_text())
    assert report["ok"] == (code == 0)
    assert report["quick"]
    assert report["seconds"] > 0
    assert report["command"].startswith("python -m forebay.bench.gpu_moe")
    assert "dense / forebay" in capsys.readouterr().out


def test_the_driver_s_complaint_is_in_the_line(monkeypatch):
    def complain() -> bool:
        warnings.warn("The NVIDIA driver\nis too old", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", complain)
    assert "(The NVIDIA driver is too old)" in gpu_moe.missing()


def test_a_file_that_cannot_be_written_is_found_before_measuring(tmp_path):
    assert "--json" in gpu_report.unwritable("--json", tmp_path / "none" / "x.json")
    assert gpu_report.unwritable("--json", tmp_path / "x.json") == ""


def test_a_gpu_that_fails_at_once_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(gpu_moe, "missing", lambda: "")
    monkeypatch.setattr(torch.cuda, "current_device", fail)
    with pytest.raises(typer.Exit) as ended:
        gpu_moe.main()
    assert ended.value.exit_code == 1
    assert capsys.readouterr().err == "error: out of memory\n"


# Block sizes

A, B, C = Blocks(1, 1), Blocks(2, 2), Blocks(3, 3)


@pytest.fixture
def times(monkeypatch):
    times = {A: 2.0, B: 1.0, C: math.inf}
    monkeypatch.setattr(triton_tuning, "milliseconds", lambda blocks, launch: times[blocks])
    return times


def key(kernel="hidden_few", rows=4):
    return (kernel, rows, 6, 2, 160, 64, torch.float16, CPU)


def test_a_sweep_chooses_and_keeps_the_times(times):
    sweep = Sweep(Budget(100), {SMALL: "small"})
    with choosing(sweep.choose):
        found = [triton_tuning.choose(key(), (A, B, C), print) for _ in range(2)]
    assert found == [B, B]
    assert triton_tuning.choose is not sweep.choose
    (row,) = sweep.rows
    assert (row["layer"], row["bucket"], row["default_takes"]) == ("small", "up to 4 pairs", 2.0)
    assert [candidate["milliseconds"] for candidate in row["candidates"]] == [2.0, 1.0, math.inf]


def test_a_sweep_without_time_takes_the_default(times):
    sweep = Sweep(Budget(0), {})
    assert sweep.choose(key(), (A, B), print) is A
    assert sweep.rows == []


def test_a_sweep_where_nothing_runs_leaves_the_error_to_the_caller(monkeypatch):
    def refuse(blocks, launch):
        raise RuntimeError("ptxas")

    monkeypatch.setattr(triton_tuning, "milliseconds", refuse)
    sweep = Sweep(Budget(100), {})
    assert sweep.choose(key(), (A, B), print) is A
    assert sweep.rows == []


def test_the_suggestion_is_the_best_over_all_layers(times):
    sweep = Sweep(Budget(100), {})
    sweep.choose(key(), (A, B, C), print)
    times |= {A: 1.0, B: 1.1}
    sweep.choose(key(rows=8), (A, B, C), print)
    sweep.choose(key("hidden_many", rows=-16), (A, B), print)
    few, many = suggest(sweep.rows)
    assert few["list"] == "hidden_few"
    assert few["first"] == {"r": 2, "d": 2, "warps": 4, "stages": 3}
    assert few["takes"] == pytest.approx(1.1**0.5)
    assert few["default_takes"] == pytest.approx(2**0.5)
    assert (many["list"], many["first"]["r"]) == ("hidden_many, blocks of 16 pairs", 1)
    report = gpu_run.run(plan(), Budget(0)) | {"suggested": [few, many]}
    assert "hidden_many, blocks of 16 pairs" in text_of(report)
