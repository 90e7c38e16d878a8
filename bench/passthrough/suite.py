"""What drives behind SPDK and a pool that is shared have to reach, by name, and which module measures it."""

from __future__ import annotations

from forebay.bench.suite import Bar, Part, Suite

PARTS = (
    Part("vhost", ("vhost_vs_direct_1m_qd4", "client_cpu_per_gb_vs_file_per_chunk", "blocked_vs_file_per_chunk")),
    Part("hetero", ("hetero_spdk_vs_sum",)),
    Part("worth", ("never_worse_ttft",)),
)
BARS = (
    Bar("vhost_vs_direct_1m_qd4", "bandwidth over vhost-user-blk / fio with O_DIRECT on the same file", 0.85),
    Bar("client_cpu_per_gb_vs_file_per_chunk", "our process's CPU time per GB / a file for each chunk", 0.05, False),
    Bar("blocked_vs_file_per_chunk", "time blocked in I/O per GB / the same", 1 / 23, False),
    Bar("hetero_spdk_vs_sum", "a pool over unequal drives of both kinds / the sum of each alone", 0.95),
    Bar("never_worse_ttft", "time to first token with a pool of 1 MB/s / without a pool, the worst round", 1.05, False),
)
PASSTHROUGH = Suite("passthrough", "forebay.bench.passthrough", PARTS, BARS)
