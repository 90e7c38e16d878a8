"""What compressed models have to reach, by name, and which module measures it."""

from __future__ import annotations

from forebay.bench.suite import Bar, Part, Suite

PARTS = (
    Part("method", ("fixture_mismatches", "score_vs_bruteforce_relerr")),
    Part("alignment", ("barycenter_vs_pot",)),
    Part("layer", ("decode1_vs_dense", "decode8_vs_dense", "prefill512_vs_dense")),
    Part("quality", ("ppl_gap_vs_wanda", "ppl_gap_vs_local", "ppl_gap_vs_mean")),
    Part("memory", ("peak_rss_vs_layer",)),
    Part("served", ("routed_memory_fraction_error", "vllm_logits_relerr")),
)
BARS = (
    Bar("fixture_mismatches", "kept lists, permutations and counts unlike the published code's", 0, at_least=False),
    Bar("score_vs_bruteforce_relerr", "importance against the direct expectation in float64", 1e-5, at_least=False),
    Bar("barycenter_vs_pot", "time of POT's free_support_barycenter for the same result / ours", 5.0),
    Bar("decode1_vs_dense", "tokens/s of one layer, batch 1 / vLLM's fused MoE on the dense layer", 3.0),
    Bar("decode8_vs_dense", "the same, batch 8", 2.0),
    Bar("prefill512_vs_dense", "the same, 512 tokens", 4.0),
    Bar("ppl_gap_vs_wanda", "perplexity gap of wanda's choice of units / PARSER's", 1.0),
    Bar("ppl_gap_vs_local", "perplexity gap of a choice within each expert / PARSER's", 1.0),
    Bar("ppl_gap_vs_mean", "perplexity gap of the plain mean as backbone / PARSER's", 1.0),
    Bar("peak_rss_vs_layer", "peak memory of `compress run` / one MoE layer and its rows", 2.5, at_least=False),
    Bar("routed_memory_fraction_error", "routed-expert bytes in vLLM / ((1-rho)+1/E), minus 1", 0.02, at_least=False),
    Bar("vllm_logits_relerr", "vLLM's logits against the dense reconstruction, float32", 1e-3, at_least=False),
)
MOE = Suite("moe", "forebay.bench.moe", PARTS, BARS)
