"""Configuration: what is accepted, and that every mistake is one line that names the value and the way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forebay.storage.config import PoolConfig, load_config
from forebay.storage.errors import ConfigError
from forebay.storage.units import format_bytes, format_rate, parse_bytes, parse_seconds

RAM = {"name": "ram0", "kind": "dram", "size": "1GiB"}


def pool(**changes: Any) -> dict[str, Any]:
    return {"path": "pool", "devices": [RAM], **changes}


def test_file_with_relative_paths(tmp_path: Path) -> None:
    (tmp_path / "pool.yaml").write_text(
        "path: state\nstripe: 256KiB\nfaults: {deadline: 500ms}\n"
        "devices:\n  - {name: ssd, kind: file, path: ssd.kv, size: 1GB}\n"
    )
    config = load_config(tmp_path / "pool.yaml", env={})
    assert config.path == tmp_path / "state"
    assert config.devices[0].path == tmp_path / "ssd.kv"
    assert config.devices[0].size == 10**9
    assert config.stripe == 256 * 1024
    assert config.faults.deadline == 0.5


def test_json_file_is_yaml(tmp_path: Path) -> None:
    (tmp_path / "pool.json").write_text('{"path": "s", "devices": [{"name": "r", "kind": "dram", "size": 1048576}]}')
    assert load_config(tmp_path / "pool.json", env={}).devices[0].size == 1 << 20


def test_environment_wins() -> None:
    env = {"FOREBAY_VERIFY": "false", "FOREBAY_FAULTS__DEADLINE": "5s", "FOREBAY_STRIPE": "1MiB", "FOREBAY_OTHER": "1"}
    config = load_config(pool(verify=True), env=env)
    assert config.verify is False
    assert config.faults.deadline == 5
    assert config.stripe == 1 << 20


def test_ready_object_passes_through() -> None:
    config = load_config(pool(), env={})
    assert load_config(config) is config
    assert PoolConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"strip": "1MiB"}, ["strip", "unknown key", "stripe"]),
        ({"stripe": "1000"}, ["stripe", "1000", "multiple of 4KiB"]),
        ({"stripe": "big"}, ["stripe", "'big'", "512KiB"]),
        ({"placement": "random"}, ["placement", "random", "bandwidth"]),
        ({"devices": []}, ["devices", "at least 1"]),
        ({"devices": [RAM, RAM]}, ["ram0", "twice"]),
        ({"devices": [{"name": "r", "kind": "dram"}]}, ["'r'", "size: 4GiB"]),
        ({"devices": [{"name": "r", "kind": "dram", "size": "4KiB"}]}, ["'r'", "4.0 KiB", "512.0 KiB", "larger"]),
        ({"devices": [{"name": "f", "kind": "file", "size": "1GiB"}]}, ["'f'", "path"]),
        ({"devices": [{"name": "f", "kind": "tape", "path": "x"}]}, ["devices.0.kind", "tape", "file"]),
        ({"devices": [{**RAM, "colour": 1}]}, ["devices.0.colour", "unknown key", "numa_node"]),
        ({"devices": [{**RAM, "name": "a b"}]}, ["devices.0.name", "a b"]),
        ({"devices": [{**RAM, "size": "-3"}]}, ["size", "-3"]),
        ({"watermarks": {"low": 0.9, "high": 0.5}}, ["watermarks", "0.9", "0.5"]),
        ({"watermarks": {"lo": 0.9}}, ["watermarks.lo", "unknown key", "low"]),
        ({"faults": {"deadline": "soon"}}, ["faults.deadline", "soon", "500ms"]),
        ({"faults": {"errors": 0}}, ["faults.errors", "0"]),
    ],
)
def test_mistakes_are_one_line(change: dict[str, Any], expected: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(pool(**change), env={})
    message = str(caught.value)
    assert "\n" not in message
    for part in expected:
        assert part in message, message


def test_unreadable_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "absent.yaml", env={})
    (tmp_path / "broken.yaml").write_text("path: [\n")
    with pytest.raises(ConfigError, match="not valid YAML at line"):
        load_config(tmp_path / "broken.yaml", env={})
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(ConfigError, match="expected keys"):
        load_config(tmp_path / "list.yaml", env={})


@pytest.mark.parametrize(
    ("text", "value"),
    [("4GiB", 4 << 30), ("1.5MB", 1_500_000), ("512k", 512_000), ("7", 7), ("2 TiB", 2 << 40), (9, 9)],
)
def test_sizes(text: object, value: int) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize(("text", "value"), [("500ms", 0.5), ("10s", 10.0), ("2m", 120.0), ("3", 3.0), (1.5, 1.5)])
def test_times(text: object, value: float) -> None:
    assert parse_seconds(text) == value


def test_formatting() -> None:
    assert format_bytes(1536) == "1.5 KiB"
    assert format_bytes(12) == "12 B"
    assert format_bytes(5 << 40) == "5.0 TiB"
    assert format_rate(2.1e9) == "2.10 GB/s"
