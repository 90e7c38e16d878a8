"""The documentation builds, and speaks of everything that can be set or watched."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from forebay.cli.app import app
from forebay.storage.config import DeviceConfig, FaultPolicy, PoolConfig, Watermarks, load_config

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_builds_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "kv-pool.html").exists()


@pytest.mark.parametrize("model", [PoolConfig, DeviceConfig, Watermarks, FaultPolicy])
def test_every_setting_is_described(model):
    text = (ROOT / "docs/kv-pool.md").read_text()
    assert [name for name in model.model_fields if not re.search(rf"[`{{ ]{name}[`:]", text)] == []


def test_every_metric_is_described():
    metrics = pytest.importorskip("forebay.vllm_ext.metrics")
    text = (ROOT / "docs/kv-pool.md").read_text()
    assert [name for name in metrics.definitions() if f"`{name}`" not in text] == []


def test_every_command_is_described():
    text = (ROOT / "docs/cli.md").read_text()
    names = [info.name or info.callback.__name__ for info in app.registered_commands]
    names += [group.name for group in app.registered_groups]
    assert [name for name in names if f"`forebay {name}" not in text] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_of_a_pool_are_valid(page, tmp_path):
    for number, example in enumerate(re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL)):
        path = tmp_path / f"{number}.yaml"
        path.write_text(example)
        assert load_config(path, env={}).devices


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text())]
    local = [target for target in targets if target and "://" not in target]
    assert [target for target in local if not (page.parent / target).exists()] == []
