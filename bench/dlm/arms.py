"""The ways to reuse keys and values that are compared, all of them run by the same code."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from forebay.diffusion.decoding import DecodingSettings
from forebay.diffusion.depth import DepthTable, Rule
from forebay.diffusion.passes import BlockCache

Depth = Literal["none", "table", "all"]


@dataclass(frozen=True, slots=True)
class Arm:
    """One way."""

    name: str
    meaning: str
    depth: Depth
    """How many layers reuse the shared prefix."""
    refresh: bool = True
    """Whether the prefix is computed anew every T steps; else in every one."""
    block_cache: BlockCache = "none"
    rule: Rule = "boundary"

    def settings(self, base: DecodingSettings) -> DecodingSettings:
        """How a request of this arm is decoded."""
        return replace(base, refresh=base.refresh if self.refresh else 1, block_cache=self.block_cache)

    def layers(self, table: DepthTable, prefix: int, prompt: int, generation: int) -> int:
        """b of a request."""
        if self.depth == "all":
            return table.layers
        return table.depth(prefix, prompt, generation, self.rule) if self.depth == "table" else 0


NONE = Arm("none", "every step computes every row", "none", refresh=False)
INTRA = Arm("intra", "the prefix is computed every T steps, nothing is shared between requests", "none")
PREFIX = Arm("fast_dllm_prefix", "Fast-dLLM's prefix cache", "none", block_cache="prefix")
DUAL = Arm("fast_dllm_dual", "Fast-dLLM's dual cache", "none", block_cache="dual")
BICACHE = Arm("bicache", "BiCache, by our rule", "table")
BICACHE_PAPER = Arm("bicache_paper_rule", "BiCache, by the paper's rule", "table", rule="paper")
BICACHE_DUAL = Arm("bicache_dual", "BiCache with Fast-dLLM's dual cache", "table", block_cache="dual")
ORDINARY = Arm("ordinary", "ordinary prefix reuse in all layers: the negative control", "all")
ARMS = (NONE, INTRA, PREFIX, DUAL, BICACHE, BICACHE_PAPER, BICACHE_DUAL, ORDINARY)
