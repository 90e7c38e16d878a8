"""Traces: reading them, simulating them against an oracle, and replaying them against a real pool."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.bench.kv.replay import Replay
from forebay.bench.kv.simulate import Simulation, capacities
from forebay.bench.kv.trace import Request, read_trace, repeated_share
from forebay.bench.kv.trace_report import replay_trace, simulate_trace
from forebay.storage.config import PoolConfig, load_config
from forebay.storage.errors import ConfigError

CHATS = [[0, 1, 2], [0, 1, 2, 3], [0, 9], [0, 1, 2, 3, 4], [7], [0, 9, 8], [7]]


def requests(chats: list[list[int]]) -> list[Request]:
    return [Request(float(n), 512 * len(blocks) - 100, 10, tuple(blocks)) for n, blocks in enumerate(chats)]


def write(path: Path, chats: list[list[int]]) -> Path:
    lines = [
        {"timestamp": 1000 * n, "input_length": 512 * len(blocks) - 100, "output_length": 10, "hash_ids": blocks}
        for n, blocks in enumerate(chats)
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return path


def pool(folder: Path, chunks: int, **changes: object) -> PoolConfig:
    devices = [
        {"name": "ssd", "kind": "file", "path": folder / "ssd.kv", "size": chunks * (64 << 10), "depth": 8},
    ]
    marks = {"high": 1.0, "low": 1.0}
    config = {"path": folder / "pool", "stripe": "32KiB", "watermarks": marks, "devices": devices, **changes}
    return load_config(config, env={})


def chats() -> st.SearchStrategy[list[list[int]]]:
    """Prompts over a tree of blocks: a block's id names its whole prefix, as in a real trace."""
    paths = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=40)
    return paths.map(lambda prompts: [[hash(tuple(p[: n + 1])) & 0xFFFFFF for n in range(len(p))] for p in prompts])


def test_reading(tmp_path: Path) -> None:
    found = read_trace(write(tmp_path / "t.jsonl", CHATS))
    assert found == requests(CHATS)
    assert found[0].tokens(3) == 512 * 3 - 100
    assert found[0].tokens(1) == 512
    assert len(read_trace(tmp_path / "t.jsonl", limit=2)) == 2


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no request"),
        ("{", "line 1"),
        ('{"timestamp": 1}\n', "no 'input_length'"),
        ('{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": 5}', "line 1"),
    ],
)
def test_a_bad_trace_is_one_line(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "t.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=problem):
        read_trace(tmp_path / "t.jsonl")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "missing.jsonl")


@given(chats())
def test_without_a_bound_every_repeated_block_is_hit(prompts: list[list[int]]) -> None:
    trace = requests(prompts)
    for policy in ("lru", "s3fifo"):
        run = Simulation(policy, 10**6).run(trace)
        assert run.hits.by_block == pytest.approx(repeated_share(trace))
        assert run.evictions == 0


@given(chats(), st.integers(1, 30))
def test_lru_against_a_plain_list(prompts: list[list[int]], capacity: int) -> None:
    held: list[int] = []  # coldest first
    hits = 0
    for prompt in prompts:
        found = next((n for n, block in enumerate(prompt) if block not in held), len(prompt))
        hits += found
        for block in reversed(prompt[:found]):
            held.remove(block)
            held.append(block)
        new = [block for block in prompt[found:] if block not in held]
        while len(held) + len(new) > capacity and (cold := [block for block in held if block not in prompt[found:]]):
            held.remove(cold[0])
        held += reversed(new[: max(0, capacity - len(held))])
    assert Simulation("lru", capacity).run(requests(prompts)).hits.hit_blocks == hits


def test_more_capacity_never_hurts_lru() -> None:
    trace = requests(CHATS * 5)
    rates = [Simulation("lru", size).run(trace).hits.hit_blocks for size in range(5, 12)]
    assert rates == sorted(rates)


def test_capacities_are_shares_of_what_occurs() -> None:
    assert max(capacities(requests(CHATS), 1024)) == 8
    assert capacities(requests(CHATS), 1024, capacity=4 << 20) == [8]


@pytest.mark.parametrize("policy", ["lru", "s3fifo"])
def test_a_replay_hits_what_the_simulation_says(tmp_path: Path, policy: str) -> None:
    trace = requests(CHATS * 3)
    with Replay(pool(tmp_path, 6, policy=policy), 128, longest=5) as replay:
        result = replay.run(trace)
        stats = replay.pool.stats()
    expected = Simulation(policy, 6).run(trace)
    if policy == "lru":
        assert result.hits == expected.hits
        assert stats.evictions == expected.evictions
    else:  # the pool makes room one chunk at a time, the simulation one request at a time
        assert 0.3 < result.hits.by_block <= repeated_share(trace)
    assert result.failed_loads == 0
    assert stats.leases == stats.writing == stats.pending_store_bytes == 0
    assert result.loaded_bytes == result.hits.hit_blocks * 128 * 512 == result.device_bytes["ssd"]
    assert len(result.latencies) == sum(1 for value in result.latencies if value > 0)


def test_a_replay_at_the_traces_pace(tmp_path: Path) -> None:
    trace = requests(CHATS)
    with Replay(pool(tmp_path, 100), 128, longest=5) as replay:
        result = replay.run(trace, speed=30.0)
    assert result.hits.by_block == pytest.approx(repeated_share(trace))
    assert 0 <= result.lateness < 2


def test_reports(tmp_path: Path) -> None:
    trace = write(tmp_path / "t.jsonl", CHATS * 4)
    seen: list[int] = []
    report = replay_trace(
        trace, work=tmp_path, kv_bytes_per_token=512, capacity=64 << 20, progress=lambda done, total: seen.append(done)
    )
    assert report["hit_rate_blocks"] == pytest.approx(report["repeated_blocks"])
    assert set(report["load_latency_seconds"]) == {"p50", "p90", "p99", "max"}
    assert seen == list(range(1, len(CHATS) * 4 + 1))
    assert [path.name for path in tmp_path.iterdir()] == ["t.jsonl"]
    table = simulate_trace(trace)["results"]
    assert {row["policy"] for row in table} == {"lru", "s3fifo"}
    assert max(row["hit_rate_blocks"] for row in table) == pytest.approx(report["repeated_blocks"])
