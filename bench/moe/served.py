"""Real vLLM on a compressed checkpoint: `vllm_logits_relerr`, `routed_memory_fraction_error`.

The small trained model is compressed at rho 0.9 and restored to its dense reconstruction. Each is loaded by vLLM in a
process of its own and answers the same prompts; compared are the raw logits of all their tokens. Nothing is timed, so
they run side by side.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from forebay.bench.moe.quality import MODEL
from forebay.bench.suite import Context, Measurement
from forebay.bench.texts import manual
from forebay.compression.layer import Options
from forebay.compression.restore import CompressedFolder
from forebay.compression.run import Settings, compress
from forebay.storage.errors import ForebayError

RHO = 0.9
PROMPTS = (96, 33, 7)
"""Tokens of the prompts."""


def measure(context: Context) -> Measurement:
    """Both ratios; in the long form the error in bfloat16 is among the details.

    Raises:
        ForebayError: vLLM is missing or does not start.
    """
    import torch

    compressed, dense = context.work / "compressed", context.work / "dense"
    context.say("compressing")
    settings = Settings(
        text=_text(context.work), options=Options(rho=RHO), sequences=64, length=128, allow_unseen=True,
        cache=context.work / "cache",
    )  # fmt: skip
    config = compress(MODEL, compressed, settings)
    CompressedFolder(compressed).restore(dense)
    runs = [("dense", dense, "float32"), ("compressed", compressed, "float32")]
    if not context.quick:
        runs.append(("bfloat16", compressed, "bfloat16"))
    context.say(f"vLLM on {len(runs)} models")
    with ThreadPoolExecutor(len(runs)) as pool:
        list(pool.map(lambda run: _run(run[1], run[2], context.work / f"{run[0]}.pt"), runs))
    found: dict[str, Any] = {name: torch.load(context.work / f"{name}.pt") for name, *_ in runs}
    expected = found["dense"]["logits"]
    errors = {name: float((found[name]["logits"] - expected).norm() / expected.norm()) for name in found}
    dense_bytes = found["dense"]["bytes"]
    fraction = found["compressed"]["bytes"] / dense_bytes
    expected_fraction = (1 - RHO) + 1 / config.experts
    details = {"errors": errors, "routed_bytes": {name: one["bytes"] for name, one in found.items()}}
    return Measurement(
        {
            "vllm_logits_relerr": errors["compressed"],
            "routed_memory_fraction_error": abs(fraction / expected_fraction - 1),
        },
        details | {"fraction": fraction, "expected_fraction": expected_fraction},
    )


def _text(folder: Path) -> Path:
    path = folder / "manual.txt"
    path.write_text(manual())
    return path


def _run(folder: Path, dtype: str, out: Path) -> None:
    quiet = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "forebay.bench.moe.served", str(folder), dtype, str(out)],
        capture_output=True, text=True, env=os.environ | quiet,
    )  # fmt: skip
    if done.returncode:
        raise ForebayError(f"vLLM on {folder.name}: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")


def _probe(folder: str, dtype: str, out: str) -> None:
    """In a process of its own: the logits of all prompts, and the bytes of the routed experts."""
    import random

    import torch
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=folder, dtype=dtype, max_model_len=256, enforce_eager=True, enable_prefix_caching=False, seed=0,
        max_logprobs=-1, logprobs_mode="raw_logits", num_gpu_blocks_override=64, max_num_seqs=8,
        gpu_memory_utilization=0.3,
    )  # fmt: skip
    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    prompts = [random.Random(n).choices(range(5, vocabulary), k=length) for n, length in enumerate(PROMPTS)]
    sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=-1, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    rows = [row for output in outputs for row in output.prompt_logprobs[1:]]
    logits = torch.tensor([[row[token].logprob for token in range(vocabulary)] for row in rows])
    (count,) = llm.apply_model(_routed_bytes)
    torch.save({"logits": logits, "bytes": count}, out)


def _routed_bytes(model: Any) -> int:
    return sum(tensor.nbytes for name, tensor in model.named_parameters() if ".routed_experts." in name)


if __name__ == "__main__":
    _probe(*sys.argv[1:4])
