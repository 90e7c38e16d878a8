"""RMSNorm and SwiGLU's middle, of every instruction set that this processor has, against float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from forebay.kernels import _cpu
from forebay.kernels.cpu import VARIANTS
from forebay.kernels.rows import rms_norm, silu_and_mul

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Relative: a rounding to the type, and those of float32 before it."""
SIZES = [1, 2, 3, 7, 8, 31, 32, 33, 64, 100, 768, 1030]


@pytest.fixture
def threads() -> Iterator[None]:
    """Restores the number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (3 * torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))).to(dtype)


def check(found: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    assert (found.dtype, found.is_contiguous()) == (dtype, True)
    torch.testing.assert_close(found.double(), exact, rtol=TOLERANCE[dtype], atol=1e-6)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("size", SIZES)
def test_equals_float64(size: int, variant: str, dtype: torch.dtype) -> None:
    for count in (0, 1, 5, 40):
        x, weight, both = (
            random(count, size, dtype=dtype),
            random(size, dtype=dtype),
            random(count, 2 * size, dtype=dtype),
        )
        exact = functional.rms_norm(x.double(), (size,), weight.double(), 1e-5)
        check(rms_norm(x, weight, 1e-5, variant=variant), exact, dtype)
        gate, up = both.double().chunk(2, dim=-1)
        check(silu_and_mul(both, variant=variant), functional.silu(gate) * up, dtype)


@pytest.mark.parametrize("variant", VARIANTS)
def test_result_does_not_depend_on_threads_nor_on_other_rows(variant: str, threads: None) -> None:
    x, weight = random(300, 770), random(770)
    torch.set_num_threads(1)
    normed, gated = rms_norm(x, weight, 1e-5, variant=variant), silu_and_mul(x, variant=variant)
    for count in (2, 3, 8):
        torch.set_num_threads(count)
        assert torch.equal(rms_norm(x, weight, 1e-5, variant=variant), normed)
        assert torch.equal(silu_and_mul(x[7 : 7 + count], variant=variant), gated[7 : 7 + count])


def test_what_the_kernels_do_not_read_is_torchs() -> None:
    x, weight = random(6, 8), random(8)
    for other, by in ((x.double(), weight.double()), (x.T.contiguous().T, weight), (x[:, ::2], weight[::2])):
        expected = functional.rms_norm(other, by.shape, by, 1e-5)
        torch.testing.assert_close(rms_norm(other, by, 1e-5), expected)
        gate, up = other.chunk(2, dim=-1)
        torch.testing.assert_close(silu_and_mul(other), functional.silu(gate) * up)


def test_extremes() -> None:
    x = torch.tensor([[0.0, 0.0], [torch.nan, 1.0], [1e18, -1e18], [200.0, 3.0], [-200.0, 3.0]])
    assert rms_norm(x, torch.ones(2), 1e-5)[0].tolist() == [0.0, 0.0]
    assert rms_norm(x, torch.ones(2), 1e-5)[1].isnan().all()
    assert rms_norm(x, torch.ones(2), 1e-5)[2].tolist() == pytest.approx([1.0, -1.0])
    assert silu_and_mul(x)[3:].flatten().tolist() == pytest.approx([600.0, 0.0], abs=1e-30)
    assert silu_and_mul(x)[1].isnan().all()


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(RuntimeError):
        rms_norm(random(3, 8), random(7), 1e-5)
    with pytest.raises(ValueError, match="no rows of element type 3"):
        _cpu.rows(VARIANTS[0], 3, 1, (0, 0, 0), (1, 1), 0.0)
    with pytest.raises(ValueError, match="no kernels of variant sse9"):
        _cpu.rows("sse9", 0, 1, (0, 0, 0), (0, 1), 0.0)
