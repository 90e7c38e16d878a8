"""Prefix states in a pool: found again bit for bit, and whatever goes wrong is a miss."""

from __future__ import annotations

import errno
import logging
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from forebay.diffusion.cache import prefix_key
from forebay.diffusion.prefix import PrefixStates
from forebay.diffusion.state_format import StateFormat
from forebay.storage.errors import ConfigError, PoolBusyError
from forebay.storage.pool import Lookup
from forebay.vllm_ext.diffusion.states import PoolStates, namespace, rank_config
from tests.diffusion.test_state_format import FORMATS, make, same
from tests.vllm_ext.statekit import FORM, MODEL, TRANSFORMER, Stores, config, fresh, get, prefix, put, until

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("ram", ["1MiB", None])
def test_bit_for_bit_after_a_restart(stores: Stores, form: StateFormat, ram: str | None) -> None:
    """Also where the pool has memory, all of it or a part, in front of its file."""
    pool = config(stores.folder)
    if ram:
        memory = {"name": "ram", "kind": "dram", "size": ram, "huge_pages": False}
        pool = config(stores.folder, devices=[memory, pool.devices[0].model_dump()])
    store = stores.open(pool, form)
    all_states = [make(form, tokens, 5, [2, 4]) for tokens in (1, 37, 400)]
    for states in all_states:
        put(store, states)
    for _ in range(2):
        for states in all_states:
            found = get(store, states)
            assert found is not None
            assert same(found, states)
        before, store = store, stores.reopen(pool=pool, form=form)
    assert before.statistics.restored == 3
    assert before.statistics.restored_bytes == sum(states.bytes for states in all_states)


def test_growing_writes_only_what_is_new(stores: Stores) -> None:
    store = stores.open()
    states = fresh(prefix(3), 1)
    put(store, states)
    assert store.statistics.stored == 3
    put(store, states)
    assert store.statistics.stored == 3
    states.deepen(TRANSFORMER, 3)
    states.limit = 3
    put(store, states)
    assert store.statistics.stored == 3 + 2 + 1 + 1
    found = get(stores.reopen(), states)
    assert found is not None
    assert same(found, states)


def test_what_waits_to_be_written_is_found(stores: Stores) -> None:
    store = stores.open()
    stores.device.hang(writes_only=True)
    states = fresh(prefix(3), 2)
    store.put(prefix_key(states.tokens_P), states)
    found = get(store, states)
    assert found is not None
    assert same(found, states)
    found.deepen(TRANSFORMER, 3)
    assert len(states.known) == 3
    stores.device.clear()


def test_nothing_there(stores: Stores) -> None:
    store = stores.open()
    put(store, PrefixStates(prefix(1)))
    assert get(store, PrefixStates(prefix(1))) is None
    assert store.statistics.failed_loads == store.statistics.stored == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": torch.bfloat16},
        {"rank": 1, "ranks": 2},
        {"rank": 0, "ranks": 2},
        {"config": replace(TRANSFORMER.config, rope_theta=500.0)},
        {"config": replace(TRANSFORMER.config, positions=77)},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_namespaces_differ(changes: dict[str, object]) -> None:
    usual = {"folder": MODEL, "config": TRANSFORMER.config, "dtype": torch.float32, "name": "m"}
    assert namespace(**usual).fingerprint != namespace(**{**usual, **changes}).fingerprint  # type: ignore[arg-type]


@pytest.fixture
def revision(tmp_path: Path) -> Path:
    """The folder of the same model, one of whose weights has changed."""
    folder = tmp_path / "revision"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        content = bytearray((MODEL / name).read_bytes())
        if name.startswith("model"):
            content[-1] ^= 1
        (folder / name).write_bytes(content)
    return folder


def test_two_revisions_in_one_pool(stores: Stores, revision: Path) -> None:
    """Each has its own, whatever the tokens and the shapes."""
    mine, theirs = fresh(prefix(4), 2), fresh(prefix(4), 3)
    put(stores.open(), mine)
    store = stores.reopen(model=revision)
    assert get(store, mine) is None
    put(store, theirs)
    for model, states in ((MODEL, mine), (revision, theirs)):
        found = get(stores.reopen(model=model), states)
        assert found is not None
        assert same(found, states)


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_share_a_pool_file_by_file(tmp_path: Path, ranks: int) -> None:
    pools = [rank_config(config(tmp_path), rank, ranks) for rank in range(ranks)]
    stores = [PoolStates.open(pool, MODEL, TRANSFORMER) for pool in pools]
    for store, pool in zip(stores, pools, strict=True):
        put(store, fresh(prefix(1), 2))
        assert pool.devices[0].size == (32 << 20) // ranks
        store.close()
    assert len({pool.path for pool in pools} | {pool.devices[0].path for pool in pools}) == 2 * ranks


def test_ranks_cannot_share_a_device_of_unknown_size(tmp_path: Path) -> None:
    device = {"name": "raw", "kind": "file", "path": tmp_path / "raw"}
    with pytest.raises(ConfigError, match=r"device 'raw': 2 ranks cannot share .*; give a file on it"):
        rank_config(config(tmp_path, devices=[device]), 0, 2)


def test_a_pool_in_use(stores: Stores) -> None:
    stores.open()
    with pytest.raises(PoolBusyError):
        PoolStates.open(config(stores.folder), MODEL, TRANSFORMER)


def test_damage_is_a_miss_and_mended(stores: Stores) -> None:
    store = stores.open()
    states = fresh(prefix(3), 2)
    put(store, states)
    stores.device.corrupt()
    store = stores.reopen(pool=config(stores.folder, verify=False))
    assert get(store, states) is None
    assert store.statistics.failed_loads == 1
    put(store, states)
    found = get(stores.reopen(), states)
    assert found is not None
    assert same(found, states)


def test_a_digest_that_two_prefixes_have(stores: Stores) -> None:
    store = stores.open()
    states, other = fresh(prefix(3), 2), fresh(prefix(3) + 1, 2)
    store.put(b"same", states)
    assert store.get(b"same", other.tokens_P) is None
    until(lambda: store._io.waiting(b"same") is None)
    assert store.get(b"same", other.tokens_P) is None
    assert store.get(b"same", prefix(4)) is None
    found = store.get(b"same", states.tokens_P)
    assert found is not None
    assert same(found, states)


@pytest.mark.parametrize("fault", ["fail", "short", "full", "vanish"])
def test_errors_of_devices(stores: Stores, fault: str, caplog: pytest.LogCaptureFixture) -> None:
    pool = config(stores.folder, faults={"deadline": "5s", "errors": 3, "probation": "0.2s"})
    store = stores.open(pool)
    states, more = fresh(prefix(3), 2), fresh(prefix(5), 2)
    put(store, states)
    {
        "fail": lambda: stores.device.fail(errno.EIO),
        "short": stores.device.short,
        "full": stores.device.full,
        "vanish": stores.device.vanish,
    }[fault]()
    with caplog.at_level(logging.WARNING):
        found = get(store, states)
        put(store, more)
    assert (found is None) == (fault != "full")
    assert get(store, more) is None
    problem = "a store failed: ssd" if fault == "full" else "device ssd is out of use"
    assert any(f"prefix states: {problem}" in record.message for record in caplog.records)
    stores.device.clear()

    def well() -> bool:
        put(store, more)
        again = get(store, more)
        return again is not None and same(again, more)

    until(well)


@pytest.mark.parametrize("stuck", [False, True])
def test_a_hung_device_costs_one_deadline(stores: Stores, stuck: bool) -> None:
    pool = config(stores.folder, faults={"deadline": "0.3s", "errors": 3, "probation": "60s"})
    store = stores.open(pool)
    states, more = fresh(prefix(3), 2), fresh(prefix(5), 2)
    put(store, states)
    stores.device.hang(stuck=stuck)
    started = time.monotonic()
    assert get(store, states) is None
    assert 0.2 < time.monotonic() - started < 2
    until(lambda: store._io._pool.stats().devices[0].quarantined)
    started = time.monotonic()
    store.put(prefix_key(more.tokens_P), more)
    assert get(store, states) is None
    assert time.monotonic() - started < 0.2
    stores.device.clear()


def test_putting_never_waits(stores: Stores) -> None:
    """What is too much is dropped, however long the device takes."""
    many = [fresh(prefix(number), 3) for number in range(10)]
    store = stores.open(config(stores.folder, max_pending_store=3 * many[-1].bytes))
    stores.device.hang(writes_only=True)
    started = time.monotonic()
    for states in many:
        store.put(prefix_key(states.tokens_P), states)
    assert time.monotonic() - started < 0.2
    assert 5 <= store.statistics.dropped <= 8
    stores.device.clear()
    until(lambda: store._io._writing is None)
    assert get(store, many[0]) is not None


def test_a_store_that_breaks_is_a_store_without_anything(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    store = stores.open()
    states = fresh(prefix(3), 2)
    put(store, states)
    monkeypatch.setattr(store._io._pool, "lookup", lambda key: 1 / 0)
    for _ in range(3):
        assert get(store, states) is None
        store.put(prefix_key(states.tokens_P), states)
    until(lambda: not store._io.is_alive())


def test_a_pool_smaller_than_one_prefix(stores: Stores) -> None:
    states = fresh(torch.arange(200), 3)
    store = stores.open(config(stores.folder, size="1MiB"))
    put(store, states)
    found = get(store, states)
    assert found is None or all(depth in (3,) for depth in found.states)
    assert store.bytes <= 1 << 20


def test_the_end_of_a_prefix_leaves_first(stores: Stores) -> None:
    """What is evicted for others leaves the longest unused with less and less depth."""
    store = stores.open(config(stores.folder, size="2MiB"))
    states = fresh(torch.arange(150), 1, 2, 3)
    put(store, states)
    key, pool = prefix_key(states.tokens_P), store._io._pool
    depths = []
    for number in range(30):
        parts = FORM.usable(lambda part: pool.lookup(key + part.name) is Lookup.READY)
        depths.append(max((part.number for part in parts), default=0))
        put(store, fresh(prefix(number), 1))
    assert depths[0] == 3
    assert depths[-1] == 0
    assert depths == sorted(depths, reverse=True)
    assert len(set(depths)) > 2
