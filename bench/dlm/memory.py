"""Bytes that the states of a prefix take: `state_bytes_vs_published`.

Counted on real states of a model of LLaDA's shape. The published layout keeps keys, values and the output of every
layer; ours what the depth of the request asks for.
"""

from __future__ import annotations

from typing import Any

import torch

from forebay.bench.dlm.arms import BICACHE
from forebay.bench.dlm.shape import llada_shape, random_weights
from forebay.bench.dlm.speed import SETTINGS, TABLE, USER
from forebay.bench.suite import Context, Measurement
from forebay.diffusion.prefix import PrefixStates
from forebay.diffusion.transformer import Transformer

PREFIXES = (500, 750, 1450, 4000)


def measure(context: Context) -> Measurement:
    """The worst of several prefixes."""
    transformer = Transformer(random_weights(llada_shape(hidden=32, intermediate=32, heads=2, vocabulary=100)))
    config, found = transformer.config, {}
    for prefix in PREFIXES:
        context.say(f"P = {prefix}")
        depth = BICACHE.layers(TABLE, prefix, prefix + USER, SETTINGS.length)
        states = PrefixStates(torch.full((prefix,), 5))
        states.deepen(transformer, depth)
        published = prefix * config.layers * (2 * config.kv_heads * config.head_size + config.hidden) * 4
        found[f"p{prefix}"] = {"depth": depth, "bytes": states.bytes, "published_bytes": published}
    worst: dict[str, Any] = max(found.values(), key=lambda one: one["bytes"] / one["published_bytes"])
    return Measurement({"state_bytes_vs_published": worst["bytes"] / worst["published_bytes"]}, found)
