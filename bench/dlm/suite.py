"""What reuse has to reach, by name, and which module measures it."""

from __future__ import annotations

from forebay.bench.suite import Bar, Part, Suite

PARTS = (
    Part("exact", ("exact_mode_maxdiff",)),
    Part(
        "speed",
        ("vs_none_p1450", "vs_none_p4000", "vs_intra_p1450", "vs_intra_p4000", "vs_dual_p1450", "model_fit"),
    ),
    Part("quality", ("accuracy_drop_points", "paper_rule_drop_points", "negative_control_drop_points")),
    Part("batching", ("batch8_vs_batch1",)),
    Part("memory", ("state_bytes_vs_published",)),
    Part("served", ("server_vs_runtime", "restart_hit_rate")),
)
LONG_ONLY = frozenset({"vs_none_p4000", "vs_intra_p4000"})
"""Ratios that the quick form does not measure."""
BARS = (
    Bar("exact_mode_maxdiff", "logits without reuse, through every path / a plain forward pass, float32", 1e-4, False),
    Bar("vs_none_p1450", "throughput of BiCache / no cache, 1,450 shared tokens", 3.5),
    Bar("vs_none_p4000", "the same, 4,000 shared tokens", 5.0),
    Bar("vs_intra_p1450", "BiCache / refresh within the request only, 1,450 shared tokens", 1.05),
    Bar("vs_intra_p4000", "the same, 4,000 shared tokens", 1.15),
    Bar("vs_dual_p1450", "BiCache with Fast-dLLM's dual cache / that cache alone", 1.36),
    Bar("model_fit", "measured speed-up / that by counting operations, the worst arm", 0.85),
    Bar("accuracy_drop_points", "accuracy lost by BiCache, worst task, in points", 1.8, False),
    Bar("paper_rule_drop_points", "the same by the paper's rule for the depth (reported)", 100.0, False),
    Bar("negative_control_drop_points", "accuracy lost by ordinary prefix reuse, `legend`", 50.0),
    Bar("batch8_vs_batch1", "throughput of 8 requests that share a prefix / one at a time", 1.0),
    Bar("state_bytes_vs_published", "bytes per prefix token / the published layout's", 0.5, False),
    Bar("restart_hit_rate", "prefixes found after a restart of the server, out of the pool", 1.0),
    Bar("server_vs_runtime", "tokens/s through `vllm serve` / the bare runtime", 0.9),
)
DLM = Suite("dlm", "forebay.bench.dlm", PARTS, BARS, LONG_ONLY)
