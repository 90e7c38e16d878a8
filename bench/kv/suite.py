"""What the pool has to reach, by name, and which module measures it."""

from __future__ import annotations

from forebay.bench.suite import Bar, Part, Suite

PARTS = (
    Part("stripes", ("stripe_vs_sum", "stripe_vs_equal", "stripe_vs_hash", "any_prefix_balance")),
    Part("single", ("single_device_vs_fio",)),
    Part("checksum", ("checksum_overhead",)),
    Part("fs_tier", ("cpu_per_gb_vs_fs_tier", "blocked_vs_fs_tier")),
    Part("ttft", ("ttft_warm_vs_recompute", "ttft_warm_vs_device_hit")),
)
BARS = (
    Bar("stripe_vs_sum", "read bandwidth of three unequal devices striped / sum of each alone (fio)", 0.95),
    Bar("stripe_vs_equal", "time to load with equal placement / with bandwidth placement", 2.0),
    Bar("stripe_vs_hash", "time to load with hash placement / with bandwidth placement", 2.0),
    Bar("any_prefix_balance", "worst prefix: time / ideal time (bytes / sum of devices alone)", 1.15, at_least=False),
    Bar("single_device_vs_fio", "read bandwidth of one file device / fio io_uring O_DIRECT", 0.95),
    Bar("cpu_per_gb_vs_fs_tier", "CPU seconds per GB read / vLLM's file system tier", 0.35, at_least=False),
    Bar("blocked_vs_fs_tier", "seconds blocked in I/O per GB / vLLM's file system tier", 0.10, at_least=False),
    Bar("ttft_warm_vs_recompute", "time to first token recomputed / warm from the file device", 15.0),
    Bar("ttft_warm_vs_device_hit", "time to first token warm / held by the engine itself", 1.3, at_least=False),
    Bar("checksum_overhead", "load time with / without verification", 1.10, at_least=False),
)
KV = Suite("kv", "forebay.bench.kv", PARTS, BARS)
