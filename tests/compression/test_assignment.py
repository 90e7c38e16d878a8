"""Assignments in several processes, against scipy in this one."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment

from forebay.compression import assignment, backbone
from forebay.compression.assignment import Assignments, solvers
from forebay.compression.backbone import barycenter
from tests.compression.test_parts import make

EXPERTS, UNITS = 5, 60


def costs(seed: int) -> torch.Tensor:
    return torch.randn(EXPERTS, UNITS, UNITS, generator=torch.Generator().manual_seed(seed))


def solved(assignments: Assignments) -> list[np.ndarray]:
    return [one.result() for one in [assignments.submit(expert) for expert in range(EXPERTS)]]


@pytest.mark.parametrize("processes", [0, 1, 3])
def test_several_rounds(processes):
    with Assignments(EXPERTS, UNITS, processes) as assignments:
        for seed in range(4):
            assignments.costs_EHH.copy_(costs(seed))
            for mine, cost in zip(solved(assignments), costs(seed), strict=True):
                assert (mine == linear_sum_assignment(cost.numpy())[1]).all()


@pytest.mark.parametrize("victims", [1, 2])
def test_processes_that_die(victims):
    with Assignments(EXPERTS, UNITS, 2) as assignments:
        assignments.costs_EHH.copy_(costs(1))
        solved(assignments)
        for process in assignments._processes[:victims]:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        assignments.costs_EHH.copy_(costs(2))
        for mine, cost in zip(solved(assignments), costs(2), strict=True):
            assert (mine == linear_sum_assignment(cost.numpy())[1]).all()


def test_nothing_stays_behind():
    files = len(os.listdir("/proc/self/fd"))
    with Assignments(EXPERTS, UNITS, 2) as assignments:
        solved(assignments)
        processes = assignments._processes
    assert all(process.poll() is not None for process in processes)
    assert len(os.listdir("/proc/self/fd")) == files


def test_the_barycenter_does_not_depend_on_the_processes(monkeypatch):
    experts = make(7, experts=4, units=20, size=30)
    alone = barycenter(experts)
    monkeypatch.setattr(backbone, "solvers", lambda experts, units: 3)
    several = barycenter(experts)
    assert torch.equal(alone.transport_EH, several.transport_EH)
    assert torch.equal(alone.weights.cloud(), several.weights.cloud())


def test_small_layers_start_no_process(monkeypatch):
    monkeypatch.setattr(assignment.os, "sched_getaffinity", lambda pid: set(range(16)))
    assert solvers(16, 128) == 0
    assert solvers(60, 1408) == 16
    assert solvers(8, 4096) == 8
    monkeypatch.setattr(assignment.os, "sched_getaffinity", lambda pid: {0})
    assert solvers(60, 1408) == 0
