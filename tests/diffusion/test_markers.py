"""What chat templates say about turns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jinja2
import numpy as np
import pytest
from tokenizers import Tokenizer

from forebay.diffusion.markers import Markers, common, common_end, find_ends, learn_markers

MODEL = Path(__file__).parents[2] / "tests/assets/tinydlm-prefix"
TOKENIZER = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
SPECIAL = ["<|startoftext|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|im_start|>", "<|im_end|>"]
TOKENIZER.add_special_tokens(SPECIAL)

HEADERS = (  # as Llama 3 and LLaDA have it
    "<|startoftext|>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}"
    "<|eot_id|>{% endfor %}<|start_header_id|>assistant<|end_header_id|>\n\n"
)
CHATML = (  # as Qwen and Dream have it, which put a system turn where there is none
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
INSTRUCTIONS = (  # as Llama 2 has it: plain text for marks
    "{% for m in messages %}{% if m.role == 'system' %}[INST] <<SYS>>\n{{ m.content }}\n<</SYS>>\n\n"
    "{% else %}{{ m.content }} [/INST]{% endif %}{% endfor %}"
)
MERGED = "{% for m in messages %}{{ m.content }}\n\n{% endfor %}"
REFUSED = "{% if messages[0].role == 'system' %}{{ raise_exception('no system turns') }}{% endif %}"


def render(template: str) -> Callable[[list[dict[str, str]]], list[int]]:
    compiled = jinja2.Environment().from_string(template)
    return lambda messages: TOKENIZER.encode(compiled.render(messages=messages), add_special_tokens=False).ids


def tokens(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False).ids)


def test_headers() -> None:
    """This tokenizer's tokens for two line ends depend on what follows, so these belong to the contents."""
    found = learn_markers(render(HEADERS))
    assert found.system == tokens("<|startoftext|><|start_header_id|>system<|end_header_id|>")
    assert found.user == tokens("<|eot_id|><|start_header_id|>user<|end_header_id|>")
    assert found.turn == tokens("<|eot_id|><|start_header_id|>")


def test_chatml() -> None:
    found = learn_markers(render(CHATML))
    assert found.system == tokens("<|im_start|>system\n")
    assert found.user == tokens("<|im_end|>\n<|im_start|>user\n")
    assert found.turn == tokens("<|im_end|>\n<|im_start|>")


@pytest.mark.parametrize("template", [HEADERS, CHATML, INSTRUCTIONS])
@pytest.mark.parametrize("user", ["Why?", "what is\n\nthis", "12"])
def test_the_system_turn_ends_where_the_question_begins(template: str, user: str) -> None:
    made, found = render(template), learn_markers(render(template))
    system = "Be kind.\n\nAnswer <user> questions: [system] 1, 2."
    ids = np.array(made([{"role": "system", "content": system}, {"role": "user", "content": user}]), np.int32)
    end = found.system_end(ids)
    assert TOKENIZER.decode(ids[end:].tolist(), skip_special_tokens=False).lstrip("\n").startswith(user)
    assert system in TOKENIZER.decode(ids[:end].tolist())


def test_a_question_that_merges_with_its_header() -> None:
    """Then the prefix ends before the header."""
    made, found = render(HEADERS.replace(" | trim", "")), learn_markers(render(HEADERS))
    turns = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "\n\n\nWhy?"}]
    ids = np.array(made(turns), np.int32)
    assert TOKENIZER.decode(ids[found.system_end(ids) :].tolist()).lstrip().startswith(("user", "Why"))


@pytest.mark.parametrize("template", [MERGED, REFUSED, "{{ messages[1].content }}", "nothing"])
def test_templates_that_mark_no_system_turn(template: str) -> None:
    assert learn_markers(render(template)) == Markers()


def test_boundaries() -> None:
    markers = Markers((1, 2), (9, 4), (9,))
    ids = np.array([1, 2, 7, 7, 9, 4, 7, 9, 5, 9, 4, 8], np.int32)
    assert markers.system_end(ids) == 6
    assert markers.boundaries(ids).tolist() == [5, 6, 8, 10]
    assert markers.system_end(ids[1:]) == 0
    assert Markers().system_end(ids) == 0


@pytest.mark.parametrize(
    ("marker", "ends"), [([1, 2], [3, 6]), ([2], [1, 3, 6]), ([3, 1, 2, 4], []), ([], []), ([2] * 9, [])]
)
def test_ends(marker: list[int], ends: list[int]) -> None:
    assert find_ends(np.array([2, 1, 2, 3, 1, 2], np.int32), marker).tolist() == ends


def test_what_sequences_have_in_common() -> None:
    assert common([1, 2, 3], [1, 2, 4], [1, 2]) == 2
    assert common([1], [2]) == 0
    assert common([1, 2], [1, 2]) == 2
    assert common_end([0, 2, 3], [1, 2, 3], [3]) == 1
