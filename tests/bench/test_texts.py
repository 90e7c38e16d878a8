"""Documents are real, of the length asked for, different, and the same every time."""

from __future__ import annotations

import itertools

import pytest

from forebay.bench import texts
from forebay.bench.texts import long_documents
from forebay.storage.errors import ForebayError


@pytest.fixture(scope="module")
def documents(demo_model):
    return long_documents(demo_model, 8)


def test_lengths_and_prompts(documents, demo_model):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    for document in documents:
        assert 4000 <= document.tokens <= 7000
        assert document.tokens == len(tokenizer(document.text).input_ids)
        assert document.tokens < len(tokenizer(document.prompt).input_ids) < document.tokens + 100
        assert document.prompt.index(document.text) < document.prompt.index(document.question)


def test_no_common_beginning(documents):
    assert len({document.text[:100] for document in documents}) == len({document.title for document in documents}) == 8


def test_same_every_time(documents, demo_model):
    assert long_documents(demo_model, 3) == documents[:3]


def test_long_texts_are_cut_at_a_paragraph(demo_model):
    from pydoc_data.topics import topics

    for document in long_documents(demo_model, 5, min_tokens=500, max_tokens=1000):
        assert 500 <= document.tokens <= 1000
        topic = document.title.removeprefix("Python manual, ")
        whole = topics[topic].strip()
        assert whole.startswith(document.text)
        assert document.text == whole or whole[len(document.text) :].startswith("\n\n")


def test_too_many_says_so(demo_model, monkeypatch):
    few = list(itertools.islice(texts._texts(), 3))
    monkeypatch.setattr(texts, "_texts", lambda: iter(few))
    with pytest.raises(ForebayError, match=r"only \d of 4 texts have 4000 to 7000 tokens"):
        long_documents(demo_model, 4)
