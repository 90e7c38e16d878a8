"""An engine that answers a few prompts and is killed: `python -m forebay.bench.dlm.first_life FOLDER JSON`.

In a process of its own, with the engine in that process, which starts in a third of a server's time.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

WRITTEN = 1.0
"""Seconds after which states are in the pool."""


def main() -> None:
    """JSON has `dtype`, `additional_config`, `prompts` (tokens), `length` of the answers and `prefix` (tokens)."""
    folder, options = sys.argv[1], json.loads(sys.argv[2])
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams, TokensPrompt

    engine = LLM(
        folder, dtype=options["dtype"], enforce_eager=True, additional_config=options["additional_config"],
        disable_log_stats=True,
    )  # fmt: skip
    sampling = SamplingParams(
        temperature=0, max_tokens=options["length"], ignore_eos=True, extra_args={"prefix": options["prefix"]}
    )
    engine.generate([TokensPrompt(prompt_token_ids=one) for one in options["prompts"]], sampling, use_tqdm=False)
    time.sleep(WRITTEN)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
