"""Small real models, compressed once."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from pathlib import Path

import pytest

from forebay.compression.layer import Options
from forebay.compression.run import Settings, compress

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "tests/assets/tinymoe-qwen3-8m"
CACHE = Path(tempfile.mkdtemp(prefix="forebay-backbones-"))
"""What an earlier run of the tests found must not make a test pass."""
atexit.register(shutil.rmtree, CACHE, ignore_errors=True)


def settings(**changes) -> Settings:
    """A few seconds' worth."""
    options = changes.pop("options", Options(rho=0.8))
    values = {"text": ROOT / "docs", "options": options, "sequences": 16, "length": 128, "cache": CACHE}
    return Settings(**values | changes)


@pytest.fixture(scope="session")
def compressed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A compressed folder. Not to be changed: see `damaged`."""
    out = tmp_path_factory.mktemp("moe") / "compressed"
    compress(MODEL, out, settings())
    return out


@pytest.fixture
def damaged(compressed: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(compressed, tmp_path / "damaged"))
