"""What `isolated.run_isolated` runs for diffusion models: an engine each, in a process of its own."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from forebay.bench.dlm import tasks
from forebay.diffusion.decoding import DecodingSettings
from forebay.diffusion.depth import find_table
from forebay.diffusion.runtime import Block, Runtime
from forebay.diffusion.transformer import Transformer
from forebay.diffusion.weights import load
from tests.engines.diffusion_models import TINY

PROMPTS = [item.prefix + item.rest for item in tasks.items(TINY, "legend", 6, seed=3)]
TEXT = [850, 2934, 369, 614]
"""The beginning of a sentence: its answers vary."""
REFUSED: dict[str, dict[str, Any]] = {
    "presence_penalty": {"presence_penalty": 0.5},
    "repetition_penalty": {"repetition_penalty": 1.1},
    "min_p": {"min_p": 0.1, "temperature": 1.0},
    "top_k": {"top_k": 5, "temperature": 1.0},
    "prompt_logprobs": {"prompt_logprobs": 0},
    "logit_bias": {"logit_bias": {5: 1.0}},
    "bad_words": {"bad_words": ["the"]},
    "allowed_token_ids": {"allowed_token_ids": [5]},
    "stepz": {"extra_args": {"stepz": 3}},
    "steps": {"extra_args": {"steps": 0}},
    "threshold": {"extra_args": {"threshold": 1.5}},
    "remasking": {"extra_args": {"remasking": "best"}},
    "block": {"extra_args": {"block": "many"}},
}


@contextmanager
def engine(model: Path | str, **arguments: Any) -> Iterator[Any]:
    """`vllm.LLM` in this process."""
    from vllm import LLM

    chosen = {"dtype": "float32", "max_num_seqs": 4, "disable_log_stats": False, "seed": 0, **arguments}
    llm = LLM(model=str(model), **chosen)
    yield llm
    llm.llm_engine.engine_core.shutdown()


def ask(llm: Any, prompts: list[list[int]], **options: Any) -> list[Any]:
    """Completions of prompts, greedy and without reuse across requests unless said otherwise."""
    from vllm import SamplingParams

    options["extra_args"] = {"prefix": 0, **options.get("extra_args", {})}
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 64, **options})
    found = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return [one.outputs[0] for one in found]


def bare(prompts: list[list[int]], **options: Any) -> list[list[Block]]:
    """Blocks of the bare runtime's answers."""
    weights = load(TINY)
    runtime = Runtime(Transformer(weights), find_table(TINY, weights.config))
    settings = DecodingSettings(**{"length": 64, "steps": 32, **options})
    for number, prompt in enumerate(prompts):
        runtime.submit(str(number), torch.tensor(prompt), settings)
    found: list[list[Block]] = [[] for _ in prompts]
    while not runtime.idle:
        for block in runtime.step():
            found[int(block.name)].append(block)
    return found


def tokens(blocks: list[Block], end: int = 0) -> list[int]:
    """Of an answer, up to its end token."""
    found = [token for block in blocks for token in block.tokens_N.tolist()]
    return found[: found.index(end) + 1] if end in found else found


def answers(llm: Any) -> dict[str, Any]:
    """Greedy answers, and the bare runtime's."""
    expected = [tokens(blocks) for blocks in bare(PROMPTS)]
    options = {"block": 16, "steps": 20, "remasking": "entropy", "block_cache": "dual", "refresh": 8}
    controlled = [tokens(blocks) for blocks in bare(PROMPTS[:2], **options)]
    return {
        "found": [list(one.token_ids) for one in ask(llm, PROMPTS)],
        "expected": expected,
        "controlled": [list(one.token_ids) for one in ask(llm, PROMPTS[:2], extra_args=options)],
        "controlled_expected": controlled,
    }


def sampled(llm: Any) -> dict[str, Any]:
    """Answers with temperature."""
    from vllm import SamplingParams

    def once(**options: Any) -> list[int]:
        return list(ask(llm, [TEXT], temperature=1.5, max_tokens=32, **options)[0].token_ids)

    two = llm.generate(
        {"prompt_token_ids": TEXT}, SamplingParams(n=2, temperature=1.5, max_tokens=32, seed=4), use_tqdm=False
    )
    expected = bare([TEXT], length=32, steps=16, temperature=1.5, seed=7)[0]
    return {
        "seven": [once(seed=7), once(seed=7), tokens(expected)],
        "eight": once(seed=8),
        "unseeded": [once(), once()],
        "two": [list(one.token_ids) for one in two[0].outputs],
    }


def logprobs(llm: Any) -> dict[str, Any]:
    """Of the committed tokens, beside the bare runtime's."""
    (found,) = ask(llm, [TEXT], max_tokens=40, logprobs=2, ignore_eos=True)
    blocks = bare([TEXT], length=40, steps=20, logprobs=2, ignore_end=True)[0]
    chosen = [value for block in blocks for value in block.logprobs.chosen_N.tolist()]
    return {
        "tokens": list(found.token_ids),
        "values": [at[token].logprob for at, token in zip(found.logprobs, found.token_ids, strict=True)],
        "expected": chosen,
        "counts": [len(at) for at in found.logprobs],
        "ranks": [at[token].rank for at, token in zip(found.logprobs, found.token_ids, strict=True)],
    }


def endings(llm: Any) -> dict[str, Any]:
    """Ways to end."""
    (whole,) = ask(llm, [TEXT], max_tokens=40, ignore_eos=True)
    ids = list(whole.token_ids)
    text = llm.get_tokenizer().decode(ids[:6])
    stop = text.split()[-1]

    def end(**options: Any) -> list[Any]:
        (found,) = ask(llm, [TEXT], max_tokens=40, **options)
        return [list(found.token_ids), found.finish_reason, found.stop_reason, found.text]

    return {
        "whole": [ids, whole.finish_reason, whole.stop_reason, whole.text],
        "stop": stop,
        "stopped": end(ignore_eos=True, stop=[stop]),
        "token": end(ignore_eos=True, stop_token_ids=[ids[3]]),
        "least": end(ignore_eos=True, stop_token_ids=[ids[3]], min_tokens=len(ids)),
        "one": list(ask(llm, [TEXT], max_tokens=1)[0].token_ids),
    }


def aborts(llm: Any) -> dict[str, Any]:
    """Requests that are aborted in each phase, and what the engine still holds then."""
    from vllm import SamplingParams

    core = llm.llm_engine.engine_core.engine_core
    scheduler, runtime = core.scheduler, core.model_executor.driver_worker.worker.driver.runtime
    state = {}
    for phase, steps in {"waiting": 0, "running": 1, "streaming": 40}.items():
        for number in range(6):
            params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
            llm.llm_engine.add_request(f"{phase}{number}", {"prompt_token_ids": PROMPTS[number]}, params)
        seen = 0
        for _ in range(steps):
            seen += sum(bool(one.outputs[0].token_ids) for one in llm.llm_engine.step())
            if seen:
                break
        held = len(runtime.running), len(runtime.waiting), len(scheduler.requests)
        llm.llm_engine.abort_request([f"{phase}{number}" for number in range(6)])
        for _ in range(3):
            llm.llm_engine.step()
        left = len(runtime.running), len(runtime.waiting), len(scheduler.requests), len(scheduler.sent)
        state[phase] = {
            "held": held,
            "left": left,
            "seen": bool(seen),
            "done": not llm.llm_engine.has_unfinished_requests(),
        }
    return state


def order(llm: Any) -> list[str]:
    """In which order requests end of which no more than four run at once."""
    from vllm import SamplingParams

    for number in range(8):
        params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, extra_args={"prefix": 0})
        llm.llm_engine.add_request(str(number), {"prompt_token_ids": PROMPTS[number % 6]}, params)
    found: list[str] = []
    while llm.llm_engine.has_unfinished_requests():
        found += [one.request_id.split("-")[0] for one in llm.llm_engine.step() if one.finished]
    return found


def prefixes(llm: Any) -> dict[str, Any]:
    """Reuse of a prefix that the request names, what is counted, and what is left after a reset."""
    from prometheus_client import REGISTRY
    from vllm import SamplingParams

    item, other = tasks.items(TINY, "legend", 2, seed=8)
    params = SamplingParams(temperature=0, max_tokens=8, extra_args={"prefix": len(item.prefix)})
    cached = []
    for question in (item.rest, other.rest, item.rest):
        ids = {"prompt_token_ids": item.prefix + question}
        cached.append(llm.generate(ids, params, use_tqdm=False)[0].num_cached_tokens)
        if len(cached) == 2:
            llm.reset_prefix_cache()
    automatic = []
    for question in ([7, 8], [8, 9], [9, 10]):
        ids = {"prompt_token_ids": other.prefix + question}
        found = llm.generate(ids, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
        automatic.append(found[0].num_cached_tokens)
    exact = llm.generate(
        {"prompt_token_ids": item.prefix + item.rest},
        SamplingParams(temperature=0, max_tokens=8, extra_args={"prefix": len(item.prefix), "exact": True}),
        use_tqdm=False,
    )
    time.sleep(1.1)
    ask(llm, PROMPTS[:1], max_tokens=8)
    shown = {
        sample.name: sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name.startswith(("forebay:dlm", "vllm:prefix_cache"))
    }
    return {
        "prefix": len(item.prefix),
        "cached": cached,
        "automatic": automatic,
        "exact": exact[0].num_cached_tokens,
        "metrics": shown,
    }


def refusals(llm: Any) -> dict[str, str]:
    """What is said to requests that ask for what cannot be."""
    said = {}
    for name, options in REFUSED.items():
        try:
            ask(llm, PROMPTS[:1], **options)
            said[name] = "answered"
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    try:
        from vllm.sampling_params import BeamSearchParams

        llm.beam_search([{"prompt_token_ids": PROMPTS[0]}], BeamSearchParams(beam_width=2, max_tokens=3))
        said["beam"] = "answered"
    except Exception as error:
        said["beam"] = f"{type(error).__name__}: {error}"
    said["long"] = str(len(ask(llm, [[5] * 1000], max_tokens=200, ignore_eos=True)[0].token_ids))
    return said


CHECKS: tuple[Callable[[Any], Any], ...] = (
    answers, sampled, logprobs, endings, aborts, order, prefixes, refusals,
)  # fmt: skip


def one_engine() -> dict[str, Any]:
    """Everything that one engine can answer."""
    with engine(TINY) as llm:
        return {check.__name__: check(llm) for check in CHECKS}


def two_ranks(pool: dict[str, Any]) -> dict[str, Any]:
    """Answers with tensor parallelism, and with states of prefixes from the pool and from memory."""
    from vllm import SamplingParams

    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    item, other = tasks.items(TINY, "legend", 2, seed=8)
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=1, extra_args={"prefix": len(item.prefix)})
    cached = []
    with engine(TINY, tensor_parallel_size=2, additional_config={"forebay": {"pool": pool}}) as llm:
        found = [list(one.token_ids) for one in ask(llm, PROMPTS)]
        sampled = [list(one.token_ids) for one in ask(llm, [TEXT], temperature=1.5, seed=7, max_tokens=32)]
        for question in (item.rest, other.rest, item.rest):
            ids = {"prompt_token_ids": item.prefix + question}
            cached.append(llm.generate(ids, params, use_tqdm=False)[0].num_cached_tokens)
            if len(cached) == 2:
                llm.reset_prefix_cache()
    expected = [tokens(blocks) for blocks in bare(PROMPTS)]
    expected_sampled = [tokens(bare([TEXT], length=32, steps=16, temperature=1.5, seed=7)[0])]
    return {"pairs": [[found, expected], [sampled, expected_sampled]], "cached": cached, "prefix": len(item.prefix)}


def family(folder: str, dtype: str) -> dict[str, Any]:
    """A chat with a model in the layout of its family."""
    with engine(folder, dtype=dtype) as llm:
        chat = llm.chat([{"role": "user", "content": "hello there"}], use_tqdm=False)[0]
        ids = [10, 20, 30, 40]
        (found,) = ask(llm, [ids], max_tokens=24)
        weights = load(Path(folder), getattr(torch, dtype))
        runtime = Runtime(Transformer(weights), None)
        runtime.submit("a", torch.tensor(ids), DecodingSettings(length=24, steps=12))
        blocks = []
        while not runtime.idle:
            blocks += runtime.step()
        return {
            "chat": len(chat.outputs[0].token_ids),
            "prompt": llm.get_tokenizer().decode(chat.prompt_token_ids),
            "found": list(found.token_ids),
            "expected": tokens(blocks, weights.config.end_tokens[0]),
        }


def configurations(folders: dict[str, str], arguments: list[dict[str, Any]]) -> dict[str, Any]:
    """What vLLM makes of models' folders, and of options that do not work."""
    from vllm.engine.arg_utils import EngineArgs

    def classes(model: str, **options: Any) -> list[str]:
        config = EngineArgs(model=model, **options).create_engine_config()
        return [str(config.parallel_config.worker_cls), str(config.scheduler_config.scheduler_cls)]

    refused = []
    for options in arguments:
        try:
            refused.append(str(classes(str(TINY), **options)))
        except Exception as error:
            refused.append(f"{type(error).__name__}: {error}")
    return {"classes": {name: classes(folder) for name, folder in folders.items()}, "refused": refused}


SCRIPTS: dict[str, Callable[..., Any]] = {
    script.__name__: script for script in (one_engine, two_ranks, family, configurations)
}

if __name__ == "__main__":
    print("RESULT", json.dumps(SCRIPTS[sys.argv[1]](**json.loads(sys.argv[2]))), flush=True)
