"""Stand-ins for targets, with small files for bdevs and drives."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay.storage.spdk.target import Target
from tests.storage.spdk.standin import Standin

PCI = "0000:5e:00.0"
TWO_NAMESPACES = "0000:5f:00.0"


@pytest.fixture
def standin() -> Iterator[Callable[..., Standin]]:
    """`standin(delete_waits=True)`: a target with the bdevs Malloc0 and Malloc1 and two drives, in a short folder."""
    with contextlib.ExitStack() as stack:

        def start(**options: Any) -> Standin:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="spdk")))
            files = [folder / f"disk{number}" for number in range(5)]
            for number, file in enumerate(files):
                file.write_bytes(b"")
                with file.open("r+b") as opened:
                    opened.truncate((number + 1) << 20)
            bdevs = {"Malloc0": files[0], "Malloc1": files[1]}
            drives = {PCI: [files[2]], TWO_NAMESPACES: files[3:]}
            return stack.enter_context(Standin(folder, bdevs, drives, **options))

        yield start


@pytest.fixture
def tgt(standin: Callable[..., Standin]) -> Standin:
    return standin()


@pytest.fixture
def target(tgt: Standin) -> Target:
    return Target(tgt.socket, seconds=10)
