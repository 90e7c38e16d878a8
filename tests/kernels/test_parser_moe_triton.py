"""The Triton kernels against the reference, in Triton's interpreter.

Triton reads TRITON_INTERPRET when it is imported, so all cases run in one process of their own: this file, as a script.
The interpreter multiplies the bits of bfloat16 in tl.dot, so bfloat16 is checked here only where there is none.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import torch

from tests.kernels.parser_layers import random_inputs, relative_error

ROOT = Path(__file__).parents[2]
TOLERANCE = {"float32": 2e-6, "float16": 3e-3, "bfloat16": 2e-2}


@dataclass(frozen=True)
class Case:
    tokens: int
    top_k: int
    variant: str
    dtype: str = "float32"
    activation: str = "silu"
    experts: int = 9
    hidden: int = 45
    dim: int = 77
    others: int = 1
    shift: int = 0
    int8: bool = False


CASES = (
    *(Case(1, k, "few") for k in (1, 3, 8)),
    Case(7, 4, "few", experts=28),
    *(Case(7, k, "many") for k in (2, 8)),
    *(Case(129, 1, "many", experts=experts) for experts in (9, 5, 3, 2)),  # blocks of 16, 32, 64 and 128 pairs
    Case(129, 3, "many", dim=33),
    Case(129, 1, "few", experts=129, hidden=10, dim=33),
    *(Case(2, 1, "few", activation=name) for name in ("gelu", "gelu_tanh")),
    *(Case(5, 3, "many", activation=name) for name in ("gelu", "gelu_tanh")),
    *(Case(2, 4, "few", dtype) for dtype in ("float16", "bfloat16")),
    Case(7, 3, "many", "float16"),
    Case(129, 1, "many", "float16"),
    Case(1, 3, "few", hidden=70, dim=1030),
    Case(7, 3, "many", hidden=70, dim=260),
    Case(7, 2, "many", "float16", hidden=64, dim=256),  # blocks fill rows exactly
    Case(7, 2, "many", experts=1, others=9, shift=2),  # most pairs are of other ranks
    Case(5, 1, "many", experts=3, hidden=1),
    Case(1, 1, "few", experts=1, others=0),  # nobody keeps a unit
    Case(3, 1, "many", experts=1, others=0),
    Case(0, 2, "few"),
    Case(1, 3, "few", int8=True),
    *(Case(tokens, 1, "many", dim=33, int8=True) for tokens in (20, 40, 130)),  # blocks of 32, 64 and 128 tokens
    Case(1, 3, "few", "float16", int8=True),
    Case(7, 3, "many", "float16", hidden=128, dim=256, int8=True),  # blocks fill rows exactly
    Case(3, 2, "many", experts=3, hidden=1, dim=5, int8=True),
)


@pytest.fixture(scope="module")
def errors() -> dict[str, float]:
    """By case, the error of the kernels."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.test_parser_moe_triton"],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        input=json.dumps([asdict(case) for case in CASES]),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return dict(zip(map(str, CASES), json.loads(done.stdout.splitlines()[-1])))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_equal_the_reference(case: Case, errors: dict[str, float]):
    assert errors[str(case)] <= TOLERANCE[case.dtype]


def measure(case: Case) -> float:
    """Error of the kernels; refuses a case that takes another variant than it says."""
    from forebay.kernels.parser_moe import reference, triton_forward

    sizes = asdict(case)
    activation, variant, dtype = (sizes.pop(name) for name in ("activation", "variant", "dtype"))
    inputs = random_inputs(**sizes, dtype=getattr(torch, dtype))
    assert (case.tokens * case.top_k <= case.experts) == (variant == "few"), f"{case} takes the other variant"
    y_TD = triton_forward.forward(*inputs, activation)
    assert y_TD.dtype == inputs.x_TD.dtype
    assert y_TD.shape == inputs.x_TD.shape
    return relative_error(y_TD, reference.forward(*inputs, activation)) if case.tokens else 0.0


def check_grouping() -> None:
    """Pairs come sorted by expert, in order within one, those of other ranks last."""
    from forebay.kernels.parser_moe.triton_forward import CHUNK
    from forebay.kernels.parser_moe.triton_group import group_pairs

    for pairs, experts in ((1, 3), (40, 7), (2 * CHUNK + 5, 5)):
        ids = torch.randint(-2, experts + 2, (pairs,))
        order, starts = torch.full((pairs,), -1, dtype=torch.int32), torch.empty(experts + 2, dtype=torch.int32)
        group_pairs[(experts + 1,)](ids, order, starts, pairs, experts, CHUNK)
        group = ids.where((ids >= 0) & (ids < experts), torch.tensor(experts))
        assert torch.equal(order.long(), group.argsort(stable=True))
        assert starts.tolist() == [0, *group.bincount(minlength=experts + 1).cumsum(0).tolist()]


if __name__ == "__main__":
    check_grouping()
    print(json.dumps([measure(Case(**case)) for case in json.load(sys.stdin)]))
