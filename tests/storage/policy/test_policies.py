"""The order in which names leave."""

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.storage.policy import LRU, POLICIES, S3FIFO, make_policy


def always(name):
    return True


def drain(policy, evictable=always):
    order = []
    while (name := policy.pop(evictable)) is not None:
        order.append(name)
    return order


def names(text):
    return [letter.encode() for letter in text]


@pytest.mark.parametrize("kind", POLICIES)
def test_the_tail_of_a_prompt_leaves_first(kind):
    policy = make_policy(kind)
    policy.insert(names("abcd"))
    assert drain(policy) == names("dcba")


@pytest.mark.parametrize("kind", POLICIES)
def test_a_growing_prompt_that_is_touched_keeps_its_head(kind):
    policy = make_policy(kind)
    for chunk in ("ab", "cd", "ef"):
        policy.insert(names(chunk))
        policy.touch(names("abcdef"))
    assert drain(policy) == names("fedcba")


@pytest.mark.parametrize("kind", POLICIES)
def test_what_may_not_go_stays(kind):
    policy = make_policy(kind)
    policy.insert(names("abcdef"))
    policy.touch(names("abc"))
    left = drain(policy, lambda name: name not in (b"a", b"f"))
    assert set(left) == set(names("bcde"))
    assert len(policy) == 2
    assert set(drain(policy)) == set(names("af"))


@pytest.mark.parametrize("kind", POLICIES)
def test_unknown_names_are_ignored(kind):
    policy = make_policy(kind)
    policy.touch(names("x"))
    policy.remove(b"x")
    assert policy.pop(always) is None


actions = st.lists(
    st.tuples(
        st.sampled_from(["insert", "touch", "remove", "pop"]),
        st.lists(st.integers(0, 15), min_size=1, max_size=5, unique=True),
    ),
    max_size=60,
)


@pytest.mark.parametrize("kind", POLICIES)
@given(script=actions, locked=st.sets(st.integers(0, 15)))
def test_holds_what_was_put_in(kind, script, locked):
    """Against a set: names come out once, only when they may, and none is lost or invented."""
    policy, held = make_policy(kind), set()
    for action, numbers in script:
        chosen = [bytes([n]) for n in numbers]
        if action == "insert":
            policy.insert([name for name in chosen if name not in held])
            held.update(chosen)
        elif action == "touch":
            policy.touch(chosen)
        elif action == "remove":
            policy.remove(chosen[0])
            held.discard(chosen[0])
        else:
            name = policy.pop(lambda name: name[0] not in locked)
            if name is None:
                assert all(kept[0] in locked for kept in held)
            else:
                assert name[0] not in locked
                held.remove(name)
        assert len(policy) == len(held)
    assert set(drain(policy)) == held


@given(script=actions)
def test_lru_is_lru(script):
    policy, model = LRU(), OrderedDict()
    for action, numbers in script:
        chosen = [bytes([n]) for n in numbers]
        if action in ("insert", "touch"):
            fresh = [name for name in chosen if (name in model) == (action == "touch")]
            getattr(policy, action)(fresh)
            for name in reversed(fresh):
                model.pop(name, None)
                model[name] = None
        elif action == "pop":
            assert policy.pop(always) == (model.popitem(last=False)[0] if model else None)
    assert drain(policy) == list(model)


def test_s3fifo_is_not_flushed_by_a_scan():
    policy, lru = S3FIFO(), LRU()
    hot = [b"hot%d" % i for i in range(50)]
    for order in (policy, lru):
        order.insert(hot)
        for _ in range(3):
            order.touch(hot)
        for i in range(500):
            order.insert([b"scan%d" % i])
            if len(order) > 100:
                order.pop(always)
    assert sum(name in policy._main or name in policy._small for name in hot) == 50
    assert sum(name in lru._order for name in hot) == 0


def test_s3fifo_remembers_what_left_too_early():
    policy = S3FIFO()
    policy.insert([b"kept%d" % i for i in range(20)])
    for _ in range(2):
        policy.touch([b"kept%d" % i for i in range(20)])
    policy.pop(always)
    policy.insert([b"early"])
    policy.touch([])
    while b"early" in policy._small:
        policy.pop(always)
    policy.insert([b"early"])
    assert b"early" in policy._main
