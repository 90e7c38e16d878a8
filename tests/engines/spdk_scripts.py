"""One engine whose pool lies on a drive behind a storage daemon that dies and comes back; run by `run_isolated`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from forebay.bench.storage_daemon import StorageDaemon
from tests.engines.harness import PoolEngine, prompt

PROMPTS = [prompt(seed) for seed in range(4)]


def daemon_comes_and_goes(folder: str) -> dict[str, Any]:
    """Answers and cached tokens in every state of the drive, and what was left at the end."""
    work = Path(folder)
    daemon = StorageDaemon(work / "disk", work / "socket", 65 << 20)
    daemon.start()
    pool = {
        "path": str(work / "state"),
        "stripe": "64KiB",
        "load": "always",
        "devices": [{"name": "nvme0", "kind": "spdk", "path": str(work / "socket"), "size": "64MiB", "depth": 8}],
        "faults": {"deadline": "1s", "errors": 3, "probation": "300ms"},
    }
    try:
        engine = PoolEngine(pool)
        found: dict[str, Any] = {"cold": engine.ask_all(PROMPTS)}
        engine.forget()
        found["warm"] = engine.ask_all(PROMPTS)
        engine.forget()
        daemon.freeze()
        found["frozen"] = engine.ask_all(PROMPTS)
        daemon.thaw()
        engine.recover()
        engine.forget()
        daemon.kill()
        found["dead"] = engine.ask_all(PROMPTS)
        found["still dead"] = engine.ask_all(PROMPTS)
        daemon.start()
        time.sleep(1.5)
        engine.recover()
        engine.forget()
        found["back"] = engine.ask_all(PROMPTS)
        engine.forget()
        found["warm again"] = engine.ask_all(PROMPTS)
        engine.settle()
        found["leases"] = engine.leases()
        engine.close()
    finally:
        daemon.kill()
    return found


if __name__ == "__main__":
    print("RESULT", json.dumps(globals()[sys.argv[1]](**json.loads(sys.argv[2]))))
