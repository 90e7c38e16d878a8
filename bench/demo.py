"""The main job: a real model answers questions about long documents, cold, warm from the pool, and after a restart."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from forebay.bench.models import demo_model
from forebay.bench.server import Answer, VllmServer
from forebay.bench.texts import Document, long_documents

NO_POOL: dict[str, Any] = {"kv_transfer_params": {"kv_load_tiers": []}}
"""Request option with which vLLM loads nothing from outside the engine: the prompt is recomputed."""


@dataclass
class Row:
    """What one document took."""

    title: str
    tokens: int
    cold: float
    """TTFT of the first question (seconds)."""
    recomputed: float
    """TTFT with every cache out of play."""
    warm: float
    """TTFT with the prefix read from the pool."""
    restarted: float
    """The same after the server was stopped and started again."""
    device_hit: float
    """TTFT with the prefix still in the engine."""
    same_answers: bool
    """Whether all greedy answers were identical."""
    answer: str


def default_pool(folder: Path) -> dict[str, Any]:
    """The embedded default: memory and one preallocated file."""
    return {
        "path": str(folder / "pool"),
        "devices": [
            {"name": "ram0", "kind": "dram", "size": "512MiB"},
            {"name": "file0", "kind": "file", "path": str(folder / "pool" / "file0.kv"), "size": "2GiB"},
        ],
    }


def run(documents: int = 2, *, work: Path | None = None, say: Callable[[str], None] = lambda text: None) -> list[Row]:
    """Serve the demo model and measure.

    Args:
        documents: how many documents to ask about (4k to 7k tokens each).
        work: folder for the pool and the server's log; a temporary one by default.
        say: receives one line for every step.
    """
    folder = work or Path(tempfile.mkdtemp(prefix="forebay-demo-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return _run(documents, folder, say)
    finally:
        if work is None:
            shutil.rmtree(folder, ignore_errors=True)


def _run(documents: int, folder: Path, say: Callable[[str], None]) -> list[Row]:
    model = demo_model()
    texts = long_documents(model, documents)
    pool = folder / "pool.yaml"
    pool.write_text(json.dumps(default_pool(folder), indent=2))
    server = VllmServer(model, pool, folder / "server.log", arguments=["--max-model-len", "8192"])
    say(f"starting vllm serve {model.name} with the pool {pool}")
    with server:
        first = [_measure(server, text, say) for text in texts]
    say("restarting the server: what was warm must still be warm")
    rows = []
    with server:
        for text, answers in zip(texts, first, strict=True):
            answers["restarted"] = _ask(server, text, f"{text.title}: warm after the restart", say)
            rows.append(_row(text, answers))
    return rows


def _measure(server: VllmServer, text: Document, say: Callable[[str], None]) -> dict[str, Answer]:
    answers = {"cold": _ask(server, text, f"{text.title}: cold", say)}
    server.wait_for_stores()
    server.drop_engine_cache()
    answers["warm"] = _ask(server, text, f"{text.title}: warm from the pool", say)
    answers["device_hit"] = _ask(server, text, f"{text.title}: still in the engine", say)
    server.drop_engine_cache()
    answers["recomputed"] = _ask(server, text, f"{text.title}: recomputed", say, NO_POOL)
    server.drop_engine_cache()
    return answers


def _ask(
    server: VllmServer, text: Document, what: str, say: Callable[[str], None], extra: dict[str, Any] | None = None
) -> Answer:
    started = time.monotonic()
    answer = server.ask(text.prompt, max_tokens=24, extra=extra)
    say(
        f"{what}: first token after {answer.ttft:.2f} s, {answer.cached_tokens} of {answer.prompt_tokens} "
        f"prompt tokens cached ({time.monotonic() - started:.1f} s in all)"
    )
    return answer


def _row(text: Document, answers: dict[str, Answer]) -> Row:
    return Row(
        title=text.title,
        tokens=answers["cold"].prompt_tokens,
        same_answers=len({answer.text for answer in answers.values()}) == 1,
        answer=answers["cold"].text,
        **{name: answer.ttft for name, answer in answers.items()},
    )


def as_json(rows: list[Row]) -> dict[str, Any]:
    """The result as plain data."""
    return {"rows": [asdict(row) for row in rows], "ok": all(row.same_answers for row in rows)}
