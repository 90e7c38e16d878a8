"""Shared prefixes, found in streams of prompts."""

from __future__ import annotations

import resource
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.diffusion.markers import Markers
from forebay.diffusion.prefixes import LEAST, PrefixFinder, _Remembered

SYSTEM, USER, TURN = (1, 2, 3), (9, 4, 3), (9,)
MARKERS = Markers(SYSTEM, USER, TURN)


def some(random: np.random.Generator, count: int, vocabulary: int = 1000) -> list[int]:
    return random.integers(10, 10 + vocabulary, count).tolist()


def chat(system: list[int], *contents: list[int]) -> list[int]:
    """A system turn, then turns of the user and the assistant."""
    turns = [token for content in contents[1:] for token in (9, 5, 3, *content)]
    return [*SYSTEM, *system, *USER, *contents[0], *turns, 9, 5, 3]


# ---- what is never otherwise ----

prompts = st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=25)


@given(prompts, st.booleans(), st.integers(1, 4), st.integers(1, 6), st.booleans())
@settings(deadline=None, max_examples=200)
def test_a_prefix_is_one(stream: list[list[int]], shifted: bool, least: int, count: int, marked: bool) -> None:
    """It is in the prompt, has been seen before or is marked, and is never too long or too short."""
    markers = Markers((0,), (1, 2), (1,)) if marked else None
    finder = PrefixFinder(markers, shifted=shifted, least=least, prompts=count)
    for number, prompt in enumerate(stream):
        found = finder.find(prompt)
        assert found == 0 or least <= found <= len(prompt) - shifted
        seen = any(other[:found] == prompt[:found] for other in stream[:number])
        assert not found or seen or (marked and prompt[0] == 0 and 1 in prompt[: found + shifted])


@given(prompts, st.integers(1, 6), st.integers(0, 60))
@settings(deadline=None, max_examples=200)
def test_what_is_remembered_against_a_plain_list(stream: list[list[int]], count: int, limit: int) -> None:
    mine, plain = _Remembered(count, limit), []
    for number, prompt in enumerate(stream):
        key = np.array(prompt, np.int32).tobytes()
        expected = [next((at for at, (a, b) in enumerate(zip(prompt, other)) if a != b), min(len(prompt), len(other)))
                    for other in plain]  # fmt: skip
        assert sorted(mine.shared(key).tolist()) == sorted(expected)
        if number % 3 == 2:
            mine.renew(key)
            plain = [other for place, other in enumerate(plain) if other != prompt or prompt in plain[:place]]
        else:
            mine.add(key)
        if 4 * len(prompt) <= limit:
            plain.append(prompt)
        while len(plain) > count or 4 * sum(map(len, plain)) > limit:
            plain.pop(0)
        assert [np.frombuffer(one, np.int32).tolist() for one in mine.order] == plain
        assert mine.bytes == 4 * sum(map(len, plain))
        assert sorted(mine.lengths().tolist()) == sorted(map(len, plain))


def test_nothing_shared_is_nothing_found() -> None:
    random, finder = np.random.default_rng(0), PrefixFinder()
    assert [finder.find([number, *some(random, 500)]) for number in range(300)] == [0] * 300
    assert finder.known == []


def test_a_request_may_say_it() -> None:
    random = np.random.default_rng(0)
    prompt = some(random, 200)
    assert PrefixFinder().find(prompt, 10) == 10
    assert PrefixFinder().find(prompt, 200) == 200
    assert PrefixFinder(shifted=True).find(prompt, 200) == 199
    finder = PrefixFinder()
    assert finder.find(prompt, 100) == 100
    assert finder.find(prompt[:120] + some(random, 50)) == 100


@pytest.mark.parametrize("prompt", [[], [5]])
def test_prompts_of_next_to_nothing(prompt: list[int]) -> None:
    finder = PrefixFinder(MARKERS, shifted=True, least=1)
    assert [finder.find(prompt) for _ in range(3)] == [0] * 3


def test_the_same_prompt_again() -> None:
    prompt = some(np.random.default_rng(0), 200)
    for shifted in (False, True):
        finder = PrefixFinder(shifted=shifted)
        assert [finder.find(prompt) for _ in range(3)] == [0, 200 - shifted, 200 - shifted]


# ---- streams of prompts ----


@given(
    seed=st.integers(0, 2**32),
    lengths=st.lists(st.integers(LEAST, 400), min_size=1, max_size=8),
    vocabulary=st.integers(20, 1000),
    alike=st.integers(0, 300),
    shifted=st.booleans(),
)
@settings(deadline=None, max_examples=40)
def test_streams_converge_to_their_system_prompts(
    seed: int, lengths: list[int], vocabulary: int, alike: int, shifted: bool
) -> None:
    """User parts are random, of any length, and some begin alike by chance; systems may begin alike as well."""
    random = np.random.default_rng(seed)
    start = some(random, alike)
    systems = [[*start, number, *some(random, length)] for number, length in enumerate(lengths)]
    finder, late = PrefixFinder(shifted=shifted), set()
    for number in range(40 * len(systems)):
        system = systems[random.integers(len(systems))]
        greeting = [] if random.random() < 0.8 else [7, 7, 7, 7, 7, 7]
        found = finder.find(system + greeting + some(random, int(random.integers(1, 300)), vocabulary))
        if number >= 25 * len(systems):
            late.add((systems.index(system), found))
    assert late == {(number, len(systems[number])) for number, _ in late}


def test_a_prefix_is_found_at_the_second_request() -> None:
    random = np.random.default_rng(0)
    system = some(random, 500)
    finder = PrefixFinder()
    assert [finder.find(system + some(random, 90)) for _ in range(5)] == [0, 500, 500, 500, 500]


def test_short_prefixes_are_not_worth_it() -> None:
    random = np.random.default_rng(0)
    system = some(random, LEAST - 6)
    assert [PrefixFinder().find(system + some(random, 90)) for _ in range(9)] == [0] * 9


def test_users_that_often_begin_alike_change_nothing() -> None:
    random, finder = np.random.default_rng(0), PrefixFinder()
    system, words = some(random, 500), some(random, 20)
    for _ in range(200):
        finder.find(system + words * int(random.random() < 0.5) + some(random, 90))
    assert finder.find(system + words + some(random, 90)) == 500


def test_a_document_that_is_asked_about_again_is_part_of_the_prefix() -> None:
    random, finder = np.random.default_rng(0), PrefixFinder()
    system, document = some(random, 300), some(random, 400)
    for _ in range(20):
        assert finder.find(system + some(random, 400)) in (0, 300)
    asked = [finder.find(system + document + some(random, 30)) for _ in range(3)]
    assert asked == [300, 700, 700]
    assert finder.find(system + some(random, 30)) == 300


def test_a_prefix_outlives_the_prompts_that_it_was_found_in() -> None:
    random, finder = np.random.default_rng(0), PrefixFinder(prompts=16)
    system = some(random, 300)
    for _ in range(2):
        finder.find(system + some(random, 30))
    for number in range(100):
        finder.find([number, *some(random, 300)])
    assert finder.find(system + some(random, 30)) == 300


def test_a_prefix_that_was_named_once_is_known() -> None:
    random, finder = np.random.default_rng(0), PrefixFinder()
    system = some(random, 300)
    finder.find(system + some(random, 30), given=300)
    assert finder.find(system + some(random, 30)) == 300
    assert [one.tolist() for one in finder.known] == [system]


# ---- chats ----


def test_the_first_request_of_a_chat_has_its_system_turn() -> None:
    random = np.random.default_rng(0)
    system = some(random, 200)
    finder = PrefixFinder(MARKERS)
    for _ in range(50):
        assert finder.find(chat(system, some(random, 40))) == 3 + 200 + 3


def test_a_short_system_turn_counts_with_what_follows() -> None:
    random, finder = np.random.default_rng(0), PrefixFinder(MARKERS)
    shots = [some(random, 60) for _ in range(4)]
    found = [finder.find(chat([11, 12], *shots, some(random, 40))) for _ in range(4)]
    assert found[0] == 0
    # Four turns with headers of three tokens, and of the fifth one's header only the end of the turn before it.
    assert set(found[1:]) == {3 + 2 + 4 * (3 + 60) + 1}


@given(st.integers(0, 2**32), st.integers(0, 30))
@settings(deadline=None, max_examples=30)
def test_examples_in_turns_end_where_a_turn_does(seed: int, alike: int) -> None:
    random = np.random.default_rng(seed)
    system, shots, words = some(random, 80), [some(random, 70) for _ in range(2)], some(random, alike)
    finder = PrefixFinder(MARKERS)
    found = [finder.find(chat(system, *shots, words + some(random, 40))) for _ in range(6)]
    assert found == [86] + [86 + 2 * 73 - 3 + 1] * 5


def test_a_conversation_takes_few_prefixes() -> None:
    """It grows with every turn; what is kept for it must not."""
    random, finder = np.random.default_rng(0), PrefixFinder(MARKERS)
    system, contents, found = some(random, 200), [], []
    for _ in range(30):
        contents.append(some(random, 50))
        found.append(finder.find(chat(system, *contents)))
        contents.append(some(random, 100))
    assert found == sorted(found)
    assert found[-1] > len(chat(system, *contents)) / 2
    assert len(set(found)) <= 12


def test_no_system_turn_and_no_end_of_it() -> None:
    random = np.random.default_rng(0)
    finder = PrefixFinder(MARKERS)
    assert finder.find([1, 2, 3, *some(random, 100)]) == 0
    assert finder.find([5, *USER, *some(random, 100)]) == 0
    assert finder.find(chat(some(random, 60), [])[:-3]) == 66
    assert PrefixFinder(MARKERS, shifted=True).find(chat(some(random, 60), [])[:-3]) == 65


# ---- costs ----


def test_ten_thousand_requests_in_flat_memory() -> None:
    random = np.random.default_rng(0)
    systems = [np.array(some(random, 2000), np.int32) for _ in range(20)]
    finder = PrefixFinder(prompts=64, limit=1 << 20)
    sizes = []
    for number in range(10_000):
        finder.find(np.concatenate([systems[number % 20], random.integers(0, 99, random.integers(1, 100))]))
        if number in (2000, 9999):
            sizes.append(int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize())
    assert sizes[1] - sizes[0] < 8 << 20  # the prompts in between are 64 MiB
    assert len(finder.known) <= 64


@pytest.mark.parametrize("marked", [False, True])
def test_time(marked: bool) -> None:
    """4000 tokens, 256 prompts: the middle of all, as others use this machine too."""
    random = np.random.default_rng(0)
    finder = PrefixFinder(MARKERS if marked else None)
    system = some(random, 3500)
    stream = [np.array(chat(system, some(random, 480)), np.int32) for _ in range(400)]
    spent = []
    for prompt in stream:
        start = time.perf_counter()
        finder.find(prompt)
        spent.append(time.perf_counter() - start)
    assert sorted(spent[256:])[72] < 1e-3
