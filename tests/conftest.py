"""What all tests share: the marker `needs`, and the demo model."""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

settings.register_profile("forebay", deadline=None)  # an example takes longer where something else runs as well
settings.load_profile("forebay")

PACKAGES = {
    "fio": "fio",
    "qemu-storage-daemon": "qemu-system-common",
    "losetup": "mount",
    "librte_vhost.so.23": "librte-vhost23",
}


def missing(tool: str) -> str:
    """Why `tool` (a program, a library, or `root`) cannot be used here, empty when it can."""
    if tool == "root":
        return "" if os.geteuid() == 0 else "needs root"
    if ".so." in tool:
        return "" if _loads(tool) else f"needs {tool}; on Debian 12, as root: apt-get install {PACKAGES[tool]}"
    return "" if shutil.which(tool) else f"needs {tool}; as root: apt-get install {PACKAGES.get(tool, tool)}"


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers("needs"):
        for reason in filter(None, map(missing, marker.args)):
            if os.environ.get("CI") == "true":
                pytest.fail(f"{reason} (CI=true does not skip)", pytrace=False)
            pytest.skip(reason)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For models so small that two threads get in each other's way, on a busy machine by a factor of ten."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The folder of SmolLM2-135M-Instruct, from the cache (about 20 s the first time)."""
    from forebay.bench.models import demo_model

    return demo_model()
