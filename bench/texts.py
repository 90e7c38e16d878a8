"""Real long documents to ask questions about, found on every machine that has Python.

The interpreter carries its own reference manual (`pydoc_data.topics`) and the sources of its library, both under
the PSF licence. The same interpreter always gives the same documents.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from forebay.storage.errors import ForebayError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_QUESTIONS = {
    "string-methods": "Which method removes whitespace from both ends of a string?",
    "debugger": "Which command of the debugger sets a breakpoint?",
    "typesseq": "What is the difference between a list and a tuple?",
    "formatstrings": "How do I write a number with two decimals?",
    "types": "What does the type None mean?",
    "compound": "When does the else clause of a for loop run?",
    "specialnames": "What is the method __new__ for?",
}
"""Chapters of the manual that are long enough, each with a question about it."""

_MODULE_QUESTION = "What is this Python module for? Answer in one sentence."


class Document(NamedTuple):
    """A text and a question about it."""

    title: str
    text: str
    question: str
    tokens: int
    """Length of `text` in tokens of the model."""
    prompt: str
    """Text and question as the model expects them: in its chat template when it has one."""


def manual() -> str:
    """All chapters of the interpreter's manual."""
    import pydoc_data.topics as found

    return "\n\n".join(text for _, text in sorted(found.topics.items()))


def long_documents(model: Path, count: int, *, min_tokens: int = 4000, max_tokens: int = 7000) -> list[Document]:
    """Different documents that share no prefix beyond the chat template's.

    Args:
        model: folder of a Hugging Face model; its tokenizer counts.
        count: how many; 30 and more are there with the default lengths.
        min_tokens: shorter texts are passed over.
        max_tokens: longer texts are cut at the end of a paragraph.

    Raises:
        ForebayError: when there are not enough texts of that length.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    documents: list[Document] = []
    for title, text, question in _texts():
        if len(documents) == count:
            break
        text, tokens = _cut(tokenizer, text, max_tokens)
        if tokens >= min_tokens:
            documents.append(Document(title, text, question, tokens, _prompt(tokenizer, text, question)))
    if len(documents) < count:
        raise ForebayError(
            f"only {len(documents)} of {count} texts have {min_tokens} to {max_tokens} tokens; ask for fewer or shorter"
        )
    return documents


def _texts() -> Iterator[tuple[str, str, str]]:
    """(title, text, question), the manual first."""
    from pydoc_data.topics import topics

    for topic, question in _QUESTIONS.items():
        if topic in topics:
            yield f"Python manual, {topic}", topics[topic].strip(), question
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        yield f"Python module {path.stem}", path.read_text(errors="replace").strip(), _MODULE_QUESTION


def _cut(tokenizer: PreTrainedTokenizerBase, text: str, limit: int) -> tuple[str, int]:
    """`text` up to the last paragraph that ends within `limit` tokens, and its length in tokens."""
    encoded: Any = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False, verbose=False)
    if len(encoded.input_ids) <= limit:
        return text, len(encoded.input_ids)
    end = text.rfind("\n\n", 0, encoded["offset_mapping"][limit][0])
    text = text[: max(end, 0)]
    return text, len(tokenizer(text, add_special_tokens=False).input_ids)


def _prompt(tokenizer: PreTrainedTokenizerBase, text: str, question: str) -> str:
    content = f"{text}\n\nQuestion: {question}"
    if not tokenizer.chat_template:
        return f"{content}\nAnswer:"
    chat = [{"role": "user", "content": content}]
    return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
