"""All arms on a user's own model and questions: tokens per second beside accuracy and agreement with no cache.

A question is a JSON line with `prompt`, and where there are, `system` (the shared prefix) and `answer`. An answer is
right when it contains the expected one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from forebay.bench.dlm.arms import ARMS, NONE, Arm
from forebay.bench.dlm.quality import interval
from forebay.bench.machine import describe_machine, source_commit
from forebay.diffusion.decoding import DecodingSettings, DiffusionRequest, advance
from forebay.diffusion.depth import DepthTable, find_table
from forebay.diffusion.errors import DiffusionError
from forebay.diffusion.prefix import PrefixStates
from forebay.diffusion.tokenizer import read_template, read_tokenizer
from forebay.diffusion.transformer import Transformer
from forebay.diffusion.weights import load

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FORM = 'give lines such as {"system": "...", "prompt": "...", "answer": "..."}'


class Question(NamedTuple):
    """One line, in tokens."""

    prefix: list[int]
    rest: list[int]
    answer: str | None


def run(
    model: Path | None,
    tasks: Path | None,
    *,
    length: int,
    dtype: str = "float32",
    device: str = "cpu",
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Every arm on every question, one at a time.

    Args:
        model: a Hugging Face folder.
        tasks: the questions.
        length: tokens of an answer; half as many steps.
        dtype: of the weights.
        device: to run on.
        say: told what is going on.

    Raises:
        DiffusionError: the model, the questions or an option cannot be used.
    """
    if model is None or tasks is None:
        raise DiffusionError("--model and --tasks belong together; give both")
    if dtype not in DTYPES:
        raise DiffusionError(f"--dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}")
    tokenizer = read_tokenizer(model)
    questions = read_questions(model, tasks, lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids))
    transformer = Transformer(load(model, DTYPES[dtype], device))
    longest = max(len(one.prefix) + len(one.rest) for one in questions) + length
    if longest > transformer.config.positions:
        raise DiffusionError(
            f"{tasks}: the longest prompt and --length {length} are {longest} tokens; the model has "
            f"{transformer.config.positions} positions"
        )
    table = find_table(model, transformer.config)
    settings = DecodingSettings(length=length, steps=max(1, length // 2), block=min(32, length))
    report: dict[str, Any] = {
        "benchmark": "dlm-own", "model": str(model), "questions": len(questions), "length": length, "dtype": dtype,
        "device": device, "table": table.source, "machine": describe_machine(Path()), "commit": source_commit(),
    }  # fmt: skip
    arms: dict[str, Any] = {}
    reference: list[list[int]] = []
    for arm in ARMS:
        say(f"{arm.name}: {arm.meaning}")
        found = [_answer(transformer, table, arm, one, settings) for one in questions]
        reference = reference or [tokens for tokens, _, _ in found]
        arms[arm.name] = _summary(arm, questions, found, reference, tokenizer.decode)
        arms[arm.name]["speedup"] = arms[arm.name]["tokens_per_second"] / arms[NONE.name]["tokens_per_second"]
    return report | {"arms": arms, "ok": True}


def read_questions(model: Path, path: Path, encode: Callable[[str], list[int]]) -> list[Question]:
    """The questions in a file, as the model's chat template writes them.

    Raises:
        DiffusionError: the file cannot be read, is empty, or a line has no prompt.
    """
    try:
        lines = [line for line in path.read_text().splitlines() if line.strip()]
    except OSError as error:
        raise DiffusionError(f"--tasks {path}: {error.strerror}; {FORM}") from None
    render, found = read_template(model), []
    for number, line in enumerate(lines, 1):
        try:
            one = json.loads(line)
            prompt, system, answer = str(one["prompt"]), one.get("system"), one.get("answer")
        except (ValueError, KeyError, TypeError, AttributeError):
            raise DiffusionError(f"{path}:{number} has no prompt; {FORM}") from None
        head = [{"role": "system", "content": system}] if system else []
        tokens, other = (encode(render([*head, {"role": "user", "content": one}], True)) for one in (prompt, "#"))
        shared = next((place for place, pair in enumerate(zip(tokens, other, strict=False)) if pair[0] != pair[1]), 0)
        prefix = shared if system else 0
        found.append(Question(tokens[:prefix], tokens[prefix:], None if answer is None else str(answer)))
    if not found:
        raise DiffusionError(f"{path} is empty; {FORM}")
    return found


def _answer(
    transformer: Transformer, table: DepthTable, arm: Arm, one: Question, base: DecodingSettings
) -> tuple[list[int], float, int]:
    """Tokens, seconds and reused layers of one question; the states of its prefix are not part of the time."""
    device = transformer.weights.norm_D.device
    prefix = len(one.prefix)
    depth = arm.layers(table, prefix, prefix + len(one.rest), base.length) if prefix else 0
    states = PrefixStates(torch.tensor(one.prefix, dtype=torch.long, device=device))
    states.deepen(transformer, depth)
    rest = torch.tensor(one.rest, dtype=torch.long, device=device)
    request = DiffusionRequest(transformer, states, depth, rest, arm.settings(base))
    before = time.perf_counter()
    while not request.done:
        advance(transformer, [request])
    return request.answer.tolist(), time.perf_counter() - before, depth


def _summary(
    arm: Arm,
    questions: Sequence[Question],
    found: Sequence[tuple[list[int], float, int]],
    reference: Sequence[list[int]],
    decode: Callable[[list[int]], str],
) -> dict[str, Any]:
    same = [
        mine == other
        for (tokens, _, _), expected in zip(found, reference, strict=True)
        for mine, other in zip(tokens, expected, strict=True)
    ]
    summary: dict[str, Any] = {
        "meaning": arm.meaning,
        "tokens_per_second": sum(len(tokens) for tokens, _, _ in found) / sum(seconds for _, seconds, _ in found),
        "agreement": sum(same) / len(same),
        "layers_reused": sum(depth for _, _, depth in found) / len(found),
    }
    judged = [
        one.answer.strip() in decode(tokens)
        for one, (tokens, _, _) in zip(questions, found, strict=True)
        if one.answer is not None
    ]
    if judged:
        summary |= {"accuracy": sum(judged) / len(judged), "interval": list(interval(sum(judged), len(judged)))}
    return summary
