"""What each arm does to answers: `accuracy_drop_points`, `paper_rule_drop_points`, `negative_control_drop_points`.

A small trained model answers the same questions in every arm. Its depth table is made from the questions themselves, by
the published measure. Next to accuracy stands the agreement with `none`, token by token, on them and on running text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from forebay.bench.dlm.arms import ARMS, BICACHE, BICACHE_DUAL, BICACHE_PAPER, NONE, ORDINARY, Arm
from forebay.bench.dlm.tasks import TASKS, Item, items, right
from forebay.bench.suite import Context, Measurement
from forebay.bench.texts import manual
from forebay.diffusion.attention import KeyValues
from forebay.diffusion.decoding import DecodingSettings, DiffusionRequest, advance
from forebay.diffusion.depth import TAU, DepthTable, make_table, similarity
from forebay.diffusion.prefix import PrefixStates
from forebay.diffusion.transformer import Rows, Transformer
from forebay.diffusion.weights import load

MODEL = Path(__file__).parents[2] / "tests" / "assets" / "tinydlm-prefix"
QUICK_ARMS = (NONE, BICACHE, BICACHE_DUAL, BICACHE_PAPER, ORDINARY)
SETTINGS = DecodingSettings(length=8, steps=4, block=8, refresh=4)
TEXT = DecodingSettings(length=32, steps=16, block=32, refresh=16, ignore_end=True)
SEED, BATCH = 10_004, 50


def measure(context: Context) -> Measurement:
    """All ratios of quality."""
    transformer = Transformer(load(MODEL))
    arms = QUICK_ARMS if context.quick else ARMS
    questions = {task: items(MODEL, task, 30 if context.quick else 300, SEED) for task in TASKS}
    table = _table(transformer, [item for one in questions.values() for item in one[:24]])
    found = {}
    for task, asked in questions.items():
        context.say(task)
        found[task] = _compare(transformer, asked, table, arms)
    text: dict[str, Any] = {}
    if not context.quick:
        context.say("text")
        text = _compare(transformer, _text(transformer, 16), table, arms, TEXT)
    drops = {arm.name: max(task["arms"][arm.name]["drop_points"] for task in found.values()) for arm in arms}
    legend = found["legend"]["arms"]
    return Measurement(
        {
            "accuracy_drop_points": max(drops[BICACHE.name], drops[BICACHE_DUAL.name]),
            "paper_rule_drop_points": drops[BICACHE_PAPER.name],
            "negative_control_drop_points": legend[ORDINARY.name]["drop_points"],
        },
        {"leading_layers": dict(table.leading), "tasks": found, "text": text},
    )


def _compare(
    transformer: Transformer,
    questions: Sequence[Item],
    table: DepthTable,
    arms: Sequence[Arm],
    settings: DecodingSettings = SETTINGS,
) -> dict[str, Any]:
    """Accuracy, agreement and depth of every arm."""
    found: dict[str, Any] = {}
    reference: list[list[int]] = []
    for arm in arms:
        depth = _depth(arm, table, questions[0], settings)
        answers = answer(transformer, questions, depth, arm.settings(settings))
        reference = reference or answers
        same = [
            mine == other
            for given, expected in zip(answers, reference, strict=True)
            for mine, other in zip(given, expected, strict=True)
        ]
        found[arm.name] = {"agreement": sum(same) / len(same), "layers_reused": depth} | _accuracy(answers, questions)
        if "accuracy" in found[arm.name]:
            found[arm.name]["drop_points"] = 100 * (found[NONE.name]["accuracy"] - found[arm.name]["accuracy"])
    return {"items": len(questions), "arms": found} | _guarded(transformer, questions, table, reference, settings)


def _guarded(
    transformer: Transformer,
    questions: Sequence[Item],
    table: DepthTable,
    reference: Sequence[list[int]],
    settings: DecodingSettings,
) -> dict[str, Any]:
    """The paper's rule, every request with an audit: what the guard mends of it."""
    depth = _depth(BICACHE_PAPER, table, questions[0], settings)
    answers = answer(transformer, questions, depth, settings, audit=True)
    same = sum(given == expected for given, expected in zip(answers, reference, strict=True))
    return {"paper_rule_with_guard": {"same_answers": same / len(questions)} | _accuracy(answers, questions)}


def _accuracy(answers: Sequence[list[int]], questions: Sequence[Item]) -> dict[str, Any]:
    """Share of right answers with its interval; nothing where the questions are running text."""
    if not questions[0].answer:
        return {}
    hits = sum(right(given, item) for given, item in zip(answers, questions, strict=True))
    return {"accuracy": hits / len(questions), "interval": list(interval(hits, len(questions)))}


def _depth(arm: Arm, table: DepthTable, item: Item, settings: DecodingSettings) -> int:
    prefix = len(item.prefix)
    return arm.layers(table, prefix, prefix + len(item.rest), settings.length)


def answer(
    transformer: Transformer, questions: Sequence[Item], depth: int, settings: DecodingSettings, audit: bool = False
) -> list[list[int]]:
    """The answers to all questions, many in one pass."""
    found = []
    for first in range(0, len(questions), BATCH):
        requests = []
        for item in questions[first : first + BATCH]:
            states = PrefixStates(torch.tensor(item.prefix))
            states.deepen(transformer, depth)
            rest = torch.tensor(item.rest)
            requests.append(DiffusionRequest(transformer, states, depth, rest, settings, audit=audit))
        while waiting := [request for request in requests if not request.done]:
            advance(transformer, waiting)
        found += [request.answer.tolist() for request in requests]
    return found


def _table(transformer: Transformer, questions: Sequence[Item]) -> DepthTable:
    """From prefixes alone and in whole prompts; all questions are of about the same share, so it has one entry."""
    sums = torch.zeros(transformer.config.layers)
    for item in questions:
        alone, together = (_keys(transformer, tokens) for tokens in (item.prefix, item.prefix + item.rest))
        sums += torch.tensor(similarity(alone, together))
    return make_table([(0, (sums / len(questions)).tolist())], "the questions themselves", TAU)


def _keys(transformer: Transformer, tokens: list[int]) -> list[KeyValues]:
    (computed,) = transformer.run(
        [Rows(tokens_N=torch.tensor(tokens), positions_N=torch.arange(len(tokens)), keep=True)]
    )
    return computed.own


def _text(transformer: Transformer, count: int) -> list[Item]:
    """Pieces of the interpreter's manual: 300 tokens of prefix, 50 more of the prompt."""
    from tokenizers import Tokenizer

    encoded = Tokenizer.from_file(str(MODEL / "tokenizer.json")).encode(manual()).ids
    starts = range(0, len(encoded) - 350, (len(encoded) - 350) // count)
    return [Item(encoded[first : first + 300], encoded[first + 300 : first + 350], []) for first in starts][:count]


def interval(hits: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    share, square = hits / count, z * z
    middle = (share + square / 2 / count) / (1 + square / count)
    half = z * math.sqrt(share * (1 - share) / count + square / 4 / count**2) / (1 + square / count)
    return middle - half, middle + half
