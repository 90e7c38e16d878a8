"""Engines on compressed checkpoints, one after the other in a process of their own; run by `run_isolated`."""

from __future__ import annotations

import gc
import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.engines.harness import engine_arguments

LENGTHS = (40, 7)
"""Tokens of the prompts."""
EVERY_WEIGHT = {"model_loader_extra_config": {"enable_weights_track": True}}
"""Let vLLM insist that every parameter was loaded, as it does by default for plain checkpoints only."""


@contextmanager
def engine(folder: str, **arguments: Any) -> Iterator[Any]:
    """An engine that can give the logits of whole prompts."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    tokenizer = (Path(folder) / "tokenizer.json").exists()
    defaults = {
        "enable_prefix_caching": False,
        "skip_tokenizer_init": not tokenizer,
        "max_model_len": 256,
        "max_logprobs": -1,
        "logprobs_mode": "raw_logits",
    }
    llm = None
    gc.freeze()  # or every engine's collections go through all of vLLM's modules, which takes half of its start
    try:
        llm = LLM(**engine_arguments(Path(folder), **{**defaults, **arguments}))
        yield llm
    finally:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()


def prompts(vocabulary: int) -> list[list[int]]:
    return [random.Random(n).choices(range(5, vocabulary), k=length) for n, length in enumerate(LENGTHS)]


def logits(llm: Any) -> torch.Tensor:
    """Logits after every prompt token, (N, vocabulary)."""
    from vllm import SamplingParams

    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    asked = [{"prompt_token_ids": ids} for ids in prompts(vocabulary)]
    sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=-1, logprobs=-1, detokenize=False)
    outputs = llm.generate(asked, sampling, use_tqdm=False)
    rows = [row for output in outputs for row in [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]]
    return torch.tensor([[row[token].logprob for token in range(vocabulary)] for row in rows])


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def routed_bytes(llm: Any) -> int:
    def count(model: Any) -> int:
        return sum(tensor.nbytes for name, tensor in model.named_parameters() if ".routed_experts." in name)

    (found,) = llm.apply_model(count)
    return int(found)


def one_rank(folder: str, original: str, families: dict[str, str], refused: dict[str, Any]) -> dict[str, Any]:
    """Errors in float32 and bfloat16, the memory of the experts, other families' errors, and how engines refuse."""
    with engine(f"{folder}/dense") as llm:
        expected = logits(llm)
    torch.save(expected, f"{folder}/logits.pt")
    with engine(original) as llm:
        result: dict[str, Any] = {"original": relative_error(logits(llm), expected)}
    with engine(f"{folder}/compressed", **EVERY_WEIGHT) as llm:
        result["float32"] = relative_error(logits(llm), expected)
        result["bytes"] = routed_bytes(llm)
    with engine(f"{folder}/compressed", dtype="bfloat16") as llm:
        result["bfloat16"] = relative_error(logits(llm), expected)
    result["families"] = {name: family_error(path) for name, path in families.items()}
    result["refused"] = {name: refusal(**arguments) for name, arguments in refused.items()}
    return result


def family_error(folder: str) -> float:
    """Error of a tiny compressed model against its dense reconstruction."""
    with engine(f"{folder}/dense") as llm:
        expected = logits(llm)
    with engine(f"{folder}/compressed", **EVERY_WEIGHT) as llm:
        return relative_error(logits(llm), expected)


def refusal(**arguments: Any) -> str:
    """The error with which an engine does not start."""
    try:
        with engine(**arguments):
            return "started"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def two_ranks(folder: str) -> float:
    """Error of the logits with tensor parallelism."""
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    with engine(f"{folder}/compressed", tensor_parallel_size=2) as llm:
        return relative_error(logits(llm), torch.load(f"{folder}/logits.pt"))


SCRIPTS: dict[str, Callable[..., Any]] = {script.__name__: script for script in (one_rank, two_ranks)}

if __name__ == "__main__":
    print("RESULT", json.dumps(SCRIPTS[sys.argv[1]](**json.loads(sys.argv[2]))), flush=True)
