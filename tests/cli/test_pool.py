"""`forebay pool`: what it prints and how it exits. What it does is tested with forebay.storage.maintenance."""

from __future__ import annotations

import contextlib
import os

import pytest

from forebay.storage.config import load_config
from forebay.storage.namespace import Namespace
from forebay.storage.pool import Pool
from tests.storage.test_maintenance import corrupt, fill


@pytest.fixture
def config(forebay, tmp_path):
    return load_config(tmp_path / "pool.yaml", env={})


def test_dry_run_creates_nothing(forebay, tmp_path):
    done = forebay("pool", "create", "pool.yaml", "--dry-run")
    assert done.code == 0
    assert "16.0 MiB" in done.out
    assert [path.name for path in tmp_path.iterdir()] == ["pool.yaml"]


def test_dry_run_finds_too_little_room(forebay, tmp_path):
    text = (tmp_path / "pool.yaml").read_text().replace("16MiB", "9000TiB")
    (tmp_path / "pool.yaml").write_text(text)
    done = forebay("pool", "create", "pool.yaml", "--dry-run")
    assert done.code == 1
    assert "does not fit" in done.out


def test_create(forebay, tmp_path):
    assert [device["allocate"] for device in forebay("pool", "create", "pool.yaml", "--json").data["devices"]] == [0, 0]
    assert (tmp_path / "ssd0.kv").stat().st_size >= 16 << 20


def test_inspect(forebay, config):
    assert "no chunks are stored" in forebay("pool", "inspect", "pool.yaml").err
    fill(config, "tiny", 3)
    table = forebay("pool", "inspect", "pool.yaml")
    assert table.code == 0
    assert "tiny" in table.out
    data = forebay("pool", "inspect", "pool.yaml", "--json").data
    assert data["namespaces"][0]["chunks"] == 3


def test_verify(forebay, config):
    fill(config, "tiny", 4)
    good = forebay("pool", "verify", "pool.yaml")
    assert (good.code, good.out.startswith("4 chunks, ")) == (0, True)
    corrupt(config, 1, 0, 8 << 20)
    bad = forebay("pool", "verify", "pool.yaml")
    assert (bad.code, "checksum of stripe" in bad.out) == (1, True)
    data = forebay("pool", "verify", "pool.yaml", "--drop", "--json")
    assert (data.code, data.data["dropped"] > 0) == (1, True)
    assert forebay("pool", "verify", "pool.yaml").code == 0


def test_clear_asks(forebay, config):
    fill(config, "tiny", 1)
    assert forebay("pool", "clear", "pool.yaml", stdin="n\n").code == 1
    assert config.journal_path.exists()
    assert forebay("pool", "clear", "pool.yaml", stdin="y\n").code == 0
    assert not config.journal_path.exists()


def test_clear_and_delete_without_asking(forebay, config, tmp_path):
    fill(config, "tiny", 1)
    done = forebay("pool", "clear", "pool.yaml", "--yes", "--delete", "--json")
    assert str(tmp_path / "ssd0.kv") in done.data["removed"]
    assert [path.name for path in tmp_path.iterdir()] == ["pool.yaml"]


def test_pool_in_use(forebay, config):
    with contextlib.closing(Pool.open(config, Namespace(model="m", weights="w"))):
        assert forebay("pool", "inspect", "pool.yaml", "--json").data["owner"] == os.getpid()
        done = forebay("pool", "verify", "pool.yaml")
    assert done.code == 1
    assert f"is in use by process {os.getpid()}; stop it" in done.err
