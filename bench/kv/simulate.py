"""What capacity and eviction order do to the hit rate: a whole trace against the pool's own policies, without I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from forebay.bench.kv.trace import BLOCK_TOKENS, Request
from forebay.storage.policy import Policy, make_policy

SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Capacities that are tried by default, as shares of all blocks that occur in the trace."""


@dataclass(slots=True)
class HitRate:
    """How much of the input was there already."""

    requests: int = 0
    blocks: int = 0
    hit_blocks: int = 0
    tokens: int = 0
    hit_tokens: int = 0

    def count(self, request: Request, hits: int) -> None:
        """Add a request whose first `hits` blocks were found."""
        self.requests += 1
        self.blocks += len(request.blocks)
        self.hit_blocks += hits
        self.tokens += request.input_tokens
        self.hit_tokens += request.tokens(hits)

    @property
    def by_block(self) -> float:
        """Hit blocks / blocks."""
        return self.hit_blocks / max(1, self.blocks)

    @property
    def by_token(self) -> float:
        """Hit tokens / input tokens."""
        return self.hit_tokens / max(1, self.tokens)


@dataclass(slots=True)
class Simulation:
    """One policy at one capacity."""

    policy: str
    capacity: int
    """Blocks."""
    hits: HitRate = field(default_factory=HitRate)
    evictions: int = 0

    def run(self, requests: Sequence[Request], step: Callable[[], None] = lambda: None) -> Simulation:
        """Each request finds its leading blocks and leaves the others behind; `step` is called after every one."""
        policy = make_policy(self.policy)
        held: set[bytes] = set()
        for request in requests:
            names = [block.to_bytes(8, "big") for block in request.blocks]
            hits = next((index for index, name in enumerate(names) if name not in held), len(names))
            self.hits.count(request, hits)
            policy.touch(names[:hits])
            wanted = [name for name in names[hits:] if name not in held]
            self._make_room(policy, held, frozenset(names[hits:]), len(wanted))
            stored = wanted[: max(0, self.capacity - len(held))]
            policy.insert(stored)
            held.update(stored)
            step()
        return self

    def _make_room(self, policy: Policy, held: set[bytes], busy: frozenset[bytes], count: int) -> None:
        while len(held) + count > self.capacity:
            victim = policy.pop(lambda name: name not in busy)
            if victim is None:
                return
            held.discard(victim)
            self.evictions += 1


def capacities(requests: Sequence[Request], kv_bytes_per_token: int, capacity: int = 0) -> list[int]:
    """Capacities to try, in blocks: `capacity` bytes if given, else `SHARES` of what occurs in the trace."""
    if capacity:
        return [max(1, capacity // (kv_bytes_per_token * BLOCK_TOKENS))]
    distinct = len({block for request in requests for block in request.blocks})
    return sorted({max(1, round(share * distinct)) for share in SHARES})


def simulations(sizes: Sequence[int], policies: Sequence[str]) -> Iterator[Simulation]:
    """Every policy at every capacity."""
    for policy in policies:
        for size in sizes:
            yield Simulation(policy, size)
