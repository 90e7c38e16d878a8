"""What a pass cannot do without, and which passes a generation is made of: how fast a card could be at best.

Operations are counted as in `cost.py`; bytes are the weights, read once a pass, and all keys and values, read once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from forebay.bench.moe.gpu_card import Need, Roof
from forebay.diffusion.config import DiffusionConfig
from forebay.diffusion.decoding import DecodingSettings
from forebay.diffusion.prefix import reuses_all


@dataclass(frozen=True, slots=True)
class Pass:
    """What one pass of a request computes."""

    own: int
    """Rows behind the prefix, in all layers."""
    joined: int
    """Layers that compute the prefix's rows too."""
    logits: int
    """Rows that the output layer is asked for."""


@dataclass(frozen=True, slots=True)
class Work:
    """Requests with a prefix, on one model."""

    config: DiffusionConfig
    prefix: int
    user: int
    """Tokens of the prompt behind the prefix."""
    item: int
    """Bytes of a number."""

    def passes(self, settings: DecodingSettings, depth: int) -> Iterator[Pass]:
        """All passes of a generation whose steps divide evenly among its blocks, with a fixed T above 0."""
        rest, steps = self.user + settings.length, settings.steps // settings.blocks
        deep = 0 if reuses_all(depth, self.config.layers) else self.config.layers - depth
        for number in range(steps * settings.blocks):
            block, step = divmod(number, steps)
            rows = {
                "none": rest,
                "prefix": settings.length - block * settings.block,
                "dual": settings.block,
            }[settings.block_cache]
            joined = 0 if number % settings.refresh else deep
            yield Pass(rest if not step else rows, joined, settings.block - settings.block * step // steps)

    def need(self, one: Pass, length: int) -> Need:
        """Of one pass of a request with so many tokens to generate."""
        config = self.config
        width, pairs = config.heads * config.head_size, 2 * config.kv_heads * config.head_size
        keys = self.prefix + self.user + length
        linear = config.hidden * (2 * width + pairs + 3 * config.intermediate)
        rows = one.own * config.layers + self.prefix * one.joined
        head = config.hidden * config.vocabulary
        return Need(
            float(self.item * (config.layers * (linear + pairs * keys) + head)),
            2.0 * (rows * (linear + 2 * width * keys) + head * one.logits),
        )

    def floor(self, roof: Roof, settings: DecodingSettings, depth: int) -> float:
        """Seconds of a generation in which every pass takes no longer than the card's rates say."""
        return sum(roof.floor(self.need(one, settings.length)) for one in self.passes(settings, depth))


def weight_bytes(config: DiffusionConfig, item: int) -> int:
    """Of the whole model, with its embedding."""
    width, pairs = config.heads * config.head_size, 2 * config.kv_heads * config.head_size
    layer = config.hidden * (2 * width + pairs + 3 * config.intermediate)
    return item * (config.layers * layer + 2 * config.vocabulary * config.hidden)
