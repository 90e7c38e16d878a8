"""Run a test's engine in a process of its own: two engines do not fit in one, and these need other models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.engines.harness import environment

ROOT = Path(__file__).parents[2]


def run_isolated(script: str, arguments: dict[str, Any], limit: float = 400, module: str = "scripts") -> Any:
    """Run SCRIPT of `tests/engines/MODULE.py` with `arguments` as JSON; what it prints after `RESULT`."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.engines.{module}", script, json.dumps(arguments)],
        env={**os.environ, **environment()},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
    )
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    raise AssertionError(f"{script} gave no result:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
