"""The code path of a GPU without one: on PyTorch's meta device, where kernels tell shapes only, and with stand-ins."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from forebay.bench.dlm.shape import llada_shape
from forebay.diffusion import attention
from forebay.diffusion.attention import Asked, KeyValues, attend, attend_varlen
from forebay.diffusion.config import DiffusionConfig
from forebay.diffusion.errors import DiffusionError
from forebay.diffusion.passes import BLOCK_CACHES, Passes, Span
from forebay.diffusion.prefix import PrefixStates
from forebay.diffusion.transformer import Transformer
from forebay.diffusion.weights import LayerWeights, ModelWeights
from tests.diffusion.test_attention import packed, plain

META, CUDA = torch.device("meta"), torch.device("cuda")


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    """What the path remembers are tensors of a device that the next test has not."""
    for step in range(2):
        for one in (attention.heads_first, attention.has_flash, attention._starts):
            one.cache_clear()
        if not step:
            yield


@pytest.mark.parametrize("kv_heads", [32, 8])
@pytest.mark.parametrize("flash", [True, False])
def test_passes_of_a_large_model(monkeypatch: pytest.MonkeyPatch, kv_heads: int, flash: bool) -> None:
    monkeypatch.setattr(attention, "has_flash", lambda device, dtype: flash)
    shape = llada_shape(layers=3, hidden=4096, intermediate=12288, heads=32, vocabulary=126_464)
    weights = on_meta(replace(shape, kv_heads=kv_heads))
    transformer = Transformer(weights, attention=attend_varlen if flash else attend)
    states = PrefixStates(torch.zeros(700, dtype=torch.long, device=META))
    states.deepen(transformer, 1)
    tokens, block = torch.zeros(300, dtype=torch.long, device=META), Span(100, 132)
    requests = [Passes(transformer, states, 1, 16, cache, 0.97) for cache in (*BLOCK_CACHES, *BLOCK_CACHES)]
    for begins in (True, False):
        wanted = torch.arange(*block, device=META)
        found = transformer.run([one.rows(tokens, block, wanted, begins) for one in requests])
        for one, computed in zip(requests, found, strict=True):
            one.take(computed, begins)
            assert transformer.logits(computed.hidden_ND).shape == (32, 126_464)


def on_meta(config: DiffusionConfig) -> ModelWeights:
    """Of no numbers."""

    def made(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, device=META, dtype=torch.bfloat16)

    hidden, width = config.hidden, (config.heads + 2 * config.kv_heads) * config.head_size
    layer = LayerWeights(
        attention_norm_D=made(hidden), qkv=made(width, hidden), qkv_bias=None,
        attention_output=made(hidden, hidden), mlp_norm_D=made(hidden),
        gate_up=made(2 * config.intermediate, hidden), down_DI=made(hidden, config.intermediate),
    )  # fmt: skip
    table = made(config.vocabulary, hidden)
    return ModelWeights(config, table, [layer] * config.layers, made(hidden), table)


def test_large_segments_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def varlen_attn(q: torch.Tensor, k: torch.Tensor, *others: object, **options: object) -> tuple[torch.Tensor, ...]:
        calls.append(len(k))
        return q, q[..., 0].T

    def some(count: int) -> torch.Tensor:
        return torch.zeros(count, 8, 64)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    monkeypatch.setattr(attention, "heads_first", lambda device, dtype: True)
    shared = KeyValues(some(4000), some(4000))
    for requests, expected in ((1, []), (3, [900])):
        attend_varlen([Asked(some(5), [shared, KeyValues(some(300), some(300))]) for _ in range(requests)])
        assert calls == expected


@pytest.mark.parametrize("documented", [False, True])
def test_weights_in_either_layout(monkeypatch: pytest.MonkeyPatch, documented: bool) -> None:
    def varlen_attn(*arguments: object, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
        results, weights = packed(*arguments, **options)  # type: ignore[arg-type]
        return results, weights.T if documented else weights

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    random = torch.Generator().manual_seed(0)

    def some(count: int) -> torch.Tensor:
        return torch.randn(count, 4, 16, generator=random)

    shared = KeyValues(some(9), some(9))
    asked = [Asked(some(1), [shared, KeyValues(some(2), some(2))]) for _ in range(4)]  # as many queries as heads
    for one, found in zip(asked, attend_varlen(asked), strict=True):
        torch.testing.assert_close(found.double(), plain(*one), rtol=1e-4, atol=1e-5)
    assert attention.heads_first(torch.device("cpu"), torch.float32) is not documented


def test_an_unknown_layout_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_call_varlen", lambda q, *others: (q, torch.empty(1, 1, 128)))
    with pytest.raises(DiffusionError, match=r"weights of shape \(1, 1, 128\) for 2 queries of 1 head"):
        attention.heads_first(torch.device("cpu"), torch.float32)


def test_flash_needs_a_card_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not attention.has_flash(CUDA, torch.float16)
    attention.has_flash.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert attention.has_flash(CUDA, torch.float16)
    assert not attention.has_flash(CUDA, torch.float32)
    assert not attention.has_flash(torch.device("cpu"), torch.bfloat16)
