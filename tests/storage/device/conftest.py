"""File systems and block devices made for a test."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import require

Mount = Callable[..., Path]


def command(*words: str | Path) -> str:
    """Its output; the test is skipped (fails where CI=true) when this machine does not permit it."""
    done = subprocess.run(words, capture_output=True, text=True)
    require(done.returncode == 0, f"`{' '.join(map(str, words))}` is not permitted here: {done.stderr.strip()}")
    return done.stdout.strip()


def unmount(folder: Path) -> None:
    """The kernel may still be letting go of a closed ring's file."""
    for _ in range(100):
        if subprocess.run(["umount", folder], stderr=subprocess.DEVNULL).returncode == 0:
            return
        time.sleep(0.05)
    subprocess.run(["umount", folder], check=True)


@pytest.fixture
def mount(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mount]:
    """`mount(kind, options)` -> an empty file system's folder."""
    made: list[Path] = []

    def make(kind: str, options: str = "rw") -> Path:
        folder = tmp_path_factory.mktemp(kind)
        command("mount", "-t", kind, "-o", options, "none", folder)
        made.append(folder)
        return folder

    yield make
    for folder in made:
        unmount(folder)


@pytest.fixture
def loop_device(tmp_path: Path) -> Iterator[Path]:
    """A raw block device of 80 MiB."""
    image = tmp_path / "disk.img"
    with image.open("wb") as file:
        file.truncate(80 << 20)
    device = command("losetup", "--find", "--show", "--direct-io=on", image)
    yield Path(device)
    subprocess.run(["losetup", "--detach", device], check=True)
