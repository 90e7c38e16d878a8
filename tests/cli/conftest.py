"""Commands run as a user runs them: in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest


class Outcome(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def data(self) -> dict[str, Any]:
        """Standard output as JSON."""
        return json.loads(self.out)


@pytest.fixture
def forebay(tmp_path: Path) -> Callable[..., Outcome]:
    """`forebay("pool", "inspect", ...)` in a fresh folder, where `pool.yaml` describes a small pool."""
    (tmp_path / "pool.yaml").write_text(
        "path: state\nstripe: 64KiB\ndevices:\n"
        "  - {name: ram0, kind: dram, size: 4MiB}\n"
        "  - {name: ssd0, kind: file, size: 16MiB, path: ssd0.kv}\n"
    )

    def run(*arguments: str, stdin: str = "") -> Outcome:
        done = subprocess.run(
            [sys.executable, "-m", "forebay.cli.app", *arguments],
            cwd=tmp_path,
            input=stdin,
            capture_output=True,
            text=True,
            env=os.environ
            | {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb", "XDG_CACHE_HOME": str(tmp_path / ".cache")},
        )
        assert "Traceback" not in done.stderr, done.stderr
        return Outcome(done.returncode, done.stdout, done.stderr)

    return run
