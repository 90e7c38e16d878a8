"""Sequences for profiling from files of text and chats."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forebay.diffusion.errors import DiffusionError
from forebay.diffusion.texts import Texts, draw_samples, read_texts
from forebay.diffusion.tokenizer import read_encoder, read_template

MODEL = Path(__file__).parents[2] / "tests/assets/tinydlm-prefix"
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def encode(text: str) -> list[int]:
    return [ord(one) for one in text]


def render(messages: object, answer: bool) -> str:
    assert isinstance(messages, list)
    return "".join(f"<{one['role'][0]}>{one['content']}" for one in messages) + ("<a>" if answer else "")


def draw(texts: Texts, shares: tuple[int, ...], samples: int = 5, length: int = 200, limit: int = 1000, seed: int = 0):
    return draw_samples(texts, encode, render, shares, samples=samples, length=length, limit=limit, seed=seed)


def chat(*contents: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in zip(("system", "user", "assistant", "user"), contents)]


def test_windows_come_from_many_documents_and_serve_all_shares() -> None:
    documents = [chr(first) * 1000 for first in range(50, 60)] + ["c" * 50, "d" * 130]
    found = draw(Texts(documents, []), (5, 50))
    assert len(found) == len({one.tokens[0] for one in found}) == 5
    assert all(len(one.tokens) in (130, 200) for one in found)
    assert all(one.prefixes == {5: round(0.05 * len(one.tokens)), 50: len(one.tokens) // 2} for one in found)
    assert draw(Texts(documents, []), (5, 50)) == found
    assert draw(Texts(documents, []), (5, 50), seed=1) != found


def test_short_text_gives_what_it_has() -> None:
    assert len(draw(Texts(["x" * 450], []), (5,))) == 2  # the last 50 are too few
    with pytest.raises(DiffusionError, match="no document has 100 tokens, and no chat a turn before its last question"):
        draw(Texts(["x" * 99], []), (5,))


def test_a_chats_prefix_is_all_before_its_last_question() -> None:
    (found,) = draw(Texts([], [chat("s" * 57, "q" * 34)]), (50, 60, 70))
    assert "".join(map(chr, found.tokens)) == "<s>" + "s" * 57 + "<u>" + "q" * 34 + "<a>"
    assert found.prefixes == {60: 60}
    (longer,) = draw(Texts([], [chat("s" * 57, "q" * 34, "answer", "again")]), (99,))
    assert longer.prefixes == {99: len("<s><u><a>") + 57 + 34 + 6}


def test_chats_that_do_not_fit() -> None:
    chats = [chat("s" * 500, "q"), [{"role": "user", "content": "q" * 300}], chat("s" * 99, "q"), []]
    (found,) = draw(Texts([], chats), (50, 99), limit=300)
    assert found.prefixes.keys() == {99}
    with pytest.raises(DiffusionError, match="at most 300 tokens"):
        draw(Texts([], chats), (50, 90), limit=300)


def test_a_share_takes_no_more_than_its_samples() -> None:
    chats = [chat("s" * 57, "q" * 34) for _ in range(9)]
    found = draw(Texts(["x" * 5000], chats), (50, 70), samples=4)
    assert [len(one.prefixes) for one in found] == [1] * 8
    assert sum(50 in one.prefixes for one in found) == sum(70 in one.prefixes for one in found) == 4


def test_folders(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner/a.rst").write_text("alpha")
    (tmp_path / "b.md").write_text("beta")
    (tmp_path / "skipped.png").write_bytes(b"\x89PNG")
    lines = ["text", {"text": "more"}, {"messages": chat("s", "q"), "id": 3}]
    (tmp_path / "c.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert read_texts(tmp_path) == Texts(["beta", "text", "more", "alpha"], [chat("s", "q")])
    assert read_texts(tmp_path / "b.md").documents == ["beta"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is no JSON"),
        ('{"messages": [{"role": "user"}]}', "line 2 has neither `text` nor `messages`"),
        ("[1]", "line 2 has neither"),
    ],
)
def test_lines_that_are_none(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_text('"fine"\n' + line)
    with pytest.raises(DiffusionError, match=message):
        read_texts(tmp_path)


def test_no_text(tmp_path: Path) -> None:
    with pytest.raises(DiffusionError, match="does not exist; give a file or a folder"):
        read_texts(tmp_path / "absent")
    with pytest.raises(DiffusionError, match=r"has no \.txt, .* file; give a folder with text"):
        read_texts(tmp_path)


# ---- tokenizer folders ----


def test_the_models_words() -> None:
    assert read_encoder(MODEL)("") == []
    assert len(read_encoder(MODEL)("hello there")) > 1


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(DiffusionError, match=r"tokenizer.json cannot be read"):
        read_encoder(tmp_path)


@pytest.mark.parametrize("place", ["settings", "file", "list"])
def test_chat_templates(tmp_path: Path, place: str) -> None:
    stored: object = CHATML if place == "settings" else [{"name": "default", "template": CHATML}]
    if place == "file":
        (tmp_path / "chat_template.jinja").write_text(CHATML)
    else:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": stored}))
    text = read_template(tmp_path)(chat("be kind", "hi"), True)
    assert text == "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_special_tokens_in_templates(tmp_path: Path) -> None:
    found = {"chat_template": "{{ bos_token }}{{ eos_token }}", "bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(found))
    assert read_template(tmp_path)([], False) == "<s></s>"


def test_no_template() -> None:
    assert read_template(MODEL)(chat("be kind", "hi"), True) == "be kind\n\nhi"


def test_templates_that_are_none_and_chats_that_they_refuse(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{% for")
    with pytest.raises(DiffusionError, match="its chat template cannot be read"):
        read_template(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('no system turn') }}")
    refusing = read_template(tmp_path)
    with pytest.raises(DiffusionError, match=r"refuses a chat .no system turn"):
        refusing(chat("s", "q"), True)
    texts = Texts([], [chat("s", "q")])
    with pytest.raises(DiffusionError, match="no document has"):
        draw_samples(texts, encode, refusing, (50,), samples=1, length=100, limit=100, seed=0)
