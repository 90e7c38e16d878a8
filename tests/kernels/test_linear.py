"""The kernel for linear layers of few rows, of every instruction set that this processor has, against float64."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from forebay.kernels.cpu import VARIANTS
from forebay.kernels.linear import LIMITS, linear

TOLERANCE = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""float32: its rounding; else that of one output value, computed in float32 and rounded once."""
SIZES = [(1, 1), (3, 5), (7, 64), (48, 65), (49, 16), (50, 513), (96, 511), (97, 1030), (145, 130)]
"""N, K: around whole vectors, tiles of columns and parts of K."""


@pytest.fixture
def threads() -> Iterator[None]:
    """Restores the number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def random(m: int, n: int, k: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight and bias."""
    source = torch.Generator().manual_seed(1000 * m + n + k)
    x_MK, weight_NK, bias_N = (torch.randn(*shape, generator=source) for shape in ((m, k), (n, k), (n,)))
    return x_MK.to(dtype), weight_NK.to(dtype), bias_N.to(dtype)


def check(y_MN: Tensor, x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> None:
    """Every value within the tolerance of what its summands come to without their signs."""
    exact_MN = functional.linear(x_MK.double(), weight_NK.double(), None if bias_N is None else bias_N.double())
    scale_MN = functional.linear(x_MK.double().abs(), weight_NK.double().abs()) + (
        0 if bias_N is None else bias_N.double().abs()
    )
    assert (y_MN.dtype, y_MN.shape, y_MN.is_contiguous()) == (x_MK.dtype, exact_MN.shape, True)
    assert ((y_MN.double() - exact_MN).abs() <= TOLERANCE[x_MK.dtype] * scale_MN).all()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("m", range(1, 71))
def test_equals_float64(m: int, variant: str, dtype: torch.dtype) -> None:
    for turn, (n, k) in enumerate(SIZES):
        x_MK, weight_NK, some_N = random(m, n, k, dtype)
        bias_N = some_N if (turn + m) % 2 else None
        check(linear(x_MK, weight_NK, bias_N, variant=variant), x_MK, weight_NK, bias_N)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("m", [1, 2, 5, 32, 129, 300])
def test_choice_by_rows(m: int, dtype: torch.dtype) -> None:
    x_MK, weight_NK, bias_N = random(m, 100, 70, dtype)
    check(linear(x_MK, weight_NK, bias_N), x_MK, weight_NK, bias_N)


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_few_rows_are_the_kernels(dtype: torch.dtype) -> None:
    inputs = random(32, 200, 900, dtype)
    assert torch.equal(linear(*inputs), linear(*inputs, variant=VARIANTS[0]))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_result_does_not_depend_on_threads_nor_on_other_rows(variant: str, dtype: torch.dtype, threads: None) -> None:
    x_MK, weight_NK, bias_N = random(70, 500, 1100, dtype)
    torch.set_num_threads(1)
    expected_MN = linear(x_MK, weight_NK, bias_N, variant=variant)
    for count in (2, 3, 8):
        torch.set_num_threads(count)
        assert torch.equal(linear(x_MK, weight_NK, bias_N, variant=variant), expected_MN)
        assert torch.equal(linear(x_MK[7 : 7 + count], weight_NK, bias_N, variant=variant), expected_MN[7 : 7 + count])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_of_a_larger_matrix(variant: str, dtype: torch.dtype) -> None:
    x_MK, weight_NK, bias_N = random(9, 150, 77, dtype)
    whole_MN = linear(x_MK, weight_NK, bias_N, variant=variant)
    for part in (slice(0, 50), slice(50, 53), slice(53, 150), slice(20, 20)):
        assert torch.equal(linear(x_MK, weight_NK[part], bias_N[part], variant=variant), whole_MN[:, part])


@pytest.mark.parametrize("variant", [None, *VARIANTS])
def test_what_lies_otherwise(variant: str | None) -> None:
    x_MK, weight_NK, bias_N = random(12, 60, 40)
    expected_MN = functional.linear(x_MK, weight_NK, bias_N)
    spread_N = torch.stack((bias_N, bias_N), 1)[:, 0]
    for x, weight, bias in (
        (x_MK.T.contiguous().T, weight_NK, bias_N),
        (x_MK, weight_NK.T.contiguous().T, bias_N),
        (x_MK, weight_NK, spread_N),
    ):
        torch.testing.assert_close(linear(x, weight, bias, variant=variant), expected_MN)
    folded = linear(x_MK.view(3, 4, 40), weight_NK, bias_N, variant=variant)
    torch.testing.assert_close(folded, expected_MN.view(3, 4, 60))
    torch.testing.assert_close(
        linear(x_MK.double(), weight_NK.double(), variant=variant), x_MK.double() @ weight_NK.double().T
    )


@pytest.mark.parametrize("variant", [None, *VARIANTS])
def test_nothing(variant: str | None) -> None:
    for m, n, k in ((0, 5, 6), (4, 0, 6), (4, 5, 0)):
        x_MK, weight_NK, bias_N = random(m, n, k)
        expected_MN = functional.linear(x_MK, weight_NK, bias_N)
        assert torch.equal(linear(x_MK, weight_NK, bias_N, variant=variant), expected_MN)


def test_infinity_and_nan_stay_in_their_row_and_column() -> None:
    x_MK, weight_NK, _ = random(11, 60, 70)
    x_MK[3, 5], weight_NK[8, 9] = torch.inf, torch.nan
    y_MN = linear(x_MK, weight_NK, variant=VARIANTS[0])
    bad_MN = ~y_MN.isfinite()
    assert bad_MN[3].all()
    assert bad_MN[:, 8].all()
    assert bad_MN.sum() == 60 + 11 - 1


def test_shapes_and_types_that_do_not_fit_are_refused() -> None:
    x_MK, weight_NK, bias_N = random(8, 20, 30)
    for wrong in (
        (x_MK[:, :-1], weight_NK, bias_N),
        (x_MK, weight_NK, bias_N[:-1]),
        (x_MK.bfloat16(), weight_NK, None),
        (x_MK, weight_NK, bias_N.bfloat16()),
    ):
        with pytest.raises(RuntimeError):
            linear(*wrong)
    with pytest.raises(ValueError, match="no kernels of variant sse9"):
        linear(x_MK, weight_NK, variant="sse9")


def test_calls_at_the_same_time() -> None:
    inputs = [random(m, 300, 400) for m in (2, 30, 64, 128)]
    expected = [linear(*one, variant=VARIANTS[0]) for one in inputs]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda turn: linear(*inputs[turn % 4], variant=VARIANTS[0]), range(80)))
    assert all(torch.equal(y_MN, expected[turn % 4]) for turn, y_MN in enumerate(found))
