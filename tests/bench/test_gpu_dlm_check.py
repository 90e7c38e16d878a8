"""What the measurements of a diffusion model on a GPU rest on: floors, checks, and what a profile tells."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch

from forebay.bench.dlm import gpu_check, gpu_profile, gpu_speed
from forebay.bench.dlm.arms import BICACHE, BICACHE_DUAL, DUAL, INTRA, NONE, ORDINARY, PREFIX
from forebay.bench.dlm.cost import Cost
from forebay.bench.dlm.gpu_check import ENGINES, AttentionCase, ModelCase, check
from forebay.bench.dlm.gpu_floor import Pass, Work
from forebay.bench.dlm.gpu_plan import plan, tiny
from forebay.bench.dlm.shape import random_weights
from forebay.bench.dlm.speed import SETTINGS, TABLE
from forebay.bench.moe.gpu_card import Roof
from forebay.diffusion.attention import combine
from forebay.diffusion.decoding import advance
from forebay.diffusion.transformer import Join, Transformer
from tests.diffusion.test_attention import packed

CPU = torch.device("cpu")
ROOF = Roof(1e12, 1e14)


@pytest.fixture(scope="module")
def transformer() -> Transformer:
    return Transformer(random_weights(tiny(CPU).config))


@pytest.fixture(scope="module")
def bench(transformer: Transformer) -> gpu_speed.Bench:
    plan = tiny(CPU)
    return gpu_speed.Bench.make(transformer, TABLE, plan.settings, 12, plan.user)


# Floors


def test_operations_are_those_of_the_cost_model():
    config = plan(CPU, quick=False).config
    cost, work = Cost(config, 1450, 356, 32), Work(config, 1450, 100, 2)
    for counted, expected in (
        (Pass(356, 32, 16), cost.full()),
        (Pass(356, 20, 16), cost.refresh(12)),
        (Pass(356, 0, 16), cost.step()),
        (Pass(32, 0, 16), cost.block_step()),
    ):
        assert work.need(counted, 256).operations == pytest.approx(expected)
    need = work.need(Pass(32, 0, 16), 256)
    cached = 32 * 2 * 4096 * (1450 + 356)
    assert need.bytes == 2 * (cached + 32 * (4 * 4096**2 + 3 * 4096 * 12288) + 4096 * 126_464)
    assert Roof(1e12, 1e15).floor(need) == need.bytes / 1e12


@pytest.mark.parametrize("arm", [NONE, INTRA, PREFIX, DUAL, BICACHE, BICACHE_DUAL, ORDINARY], ids=lambda arm: arm.name)
def test_passes_are_those_that_requests_make(bench, arm):
    request, found = bench.request(arm), []
    while not request.done:
        rows = request.rows()
        joined = bench.transformer.config.layers - rows.prefix.layer if isinstance(rows.prefix, Join) else 0
        found.append(Pass(len(rows.tokens_N), joined, len(rows.wanted)))
        advance(bench.transformer, [request])
    assert found == list(bench.work.passes(arm.settings(bench.settings), bench.depth(arm)))


def test_dual_cache_on_a_fast_card_is_bound_by_bytes():
    work = Work(plan(CPU, quick=False).config, 1450, 100, 2)
    none = NONE.settings(SETTINGS)
    full = work.floor(ROOF, none, 0)
    assert full == pytest.approx(sum(work.need(one, 256).operations / 1e14 for one in work.passes(none, 0)))
    assert full > 10 * work.floor(ROOF, BICACHE_DUAL.settings(SETTINGS), 13)


# Checks


@pytest.mark.parametrize(
    "case",
    [
        AttentionCase(gpu_check.ALONE, torch.bfloat16, kv_heads=8),
        AttentionCase(gpu_check.ALONE, torch.float32, 4, 1, 48, single=True),
        ModelCase(gpu_check.ALONE, torch.float32, kv_heads=1),
        ModelCase(gpu_check.ALONE, torch.bfloat16),
    ],
    ids=str,
)
def test_checks_pass(case):
    found = check(case, CPU)
    assert found["ok"], found


@pytest.mark.parametrize(
    "case", [AttentionCase(gpu_check.VARLEN, torch.float32, 4, 2), ModelCase(gpu_check.VARLEN, torch.float32)]
)
def test_checks_pass_with_what_stands_in_for_a_gpu(monkeypatch, case):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", packed)
    assert check(case, CPU)["ok"]


def test_checks_find_what_is_wrong(monkeypatch):
    right = ENGINES[gpu_check.ALONE]

    def without_weights(pairs):
        return [one._replace(weights=torch.zeros_like(one.weights)) for one in right(pairs)]

    monkeypatch.setattr(gpu_check, "ENGINES", {"wrong": without_weights})
    monkeypatch.setattr(gpu_check, "ATTENTION", {"wrong": lambda asked: combine(asked, without_weights)})
    for case in (AttentionCase("wrong", torch.float32), ModelCase("wrong", torch.bfloat16)):
        assert not check(case, CPU)["ok"]


# What CUDA tells


def test_kernels_are_summed_and_the_longest_named():
    def event(name: str, kind: object, microseconds: float, count: int) -> SimpleNamespace:
        return SimpleNamespace(key=name, device_type=kind, self_device_time_total=microseconds, count=count)

    device = torch.autograd.DeviceType
    found = gpu_profile.summary(
        [event("aten::mm", device.CPU, 30, 9), event("copy", device.CUDA, 10, 2), event("gemm", device.CUDA, 30, 9)]
    )
    assert found["kernel_seconds"] == 40e-6
    assert found["kernels"] == 11
    assert found["longest"][0] == {"name": "gemm", "seconds": 30e-6, "count": 9}


def test_waits_are_told_by_their_line(bench, monkeypatch):
    modes = []
    argsort = torch.Tensor.argsort

    def waiting(tensor: torch.Tensor, **options: bool) -> torch.Tensor:
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
        return argsort(tensor, **options)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(torch.Tensor, "argsort", waiting)
    request = bench.request(NONE)
    found = gpu_profile.host_waits(lambda: gpu_speed.step(request))
    assert modes == ["warn", "default"]
    assert sum(found.values()) >= 1
    assert all(line.startswith("diffusion/remasking.py:") for line in found)
