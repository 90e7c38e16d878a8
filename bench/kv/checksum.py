"""What verification costs: `checksum_overhead`.

The same chunks on one file device, loaded with and without verification, into registered page-aligned memory (direct)
and into memory that direct I/O cannot reach, one byte off a page (staged). The worse of the two ratios counts.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path

from forebay.bench.kv.session import Memory2D, Session, keys
from forebay.bench.rig import require_space
from forebay.bench.rounds import Series, interleave
from forebay.bench.suite import Context, Measurement, medians
from forebay.storage.config import PoolConfig, load_config

MIB = 1 << 20
CHUNK = 3 * MIB
TOTAL, QUICK_TOTAL = 1536 * MIB, 384 * MIB
STRIPE = 512 << 10
MEMORIES = {"direct": 0, "staged": 1}
"""Bytes by which the rows begin off a page."""


def measure(context: Context) -> Measurement:
    """The worse ratio of median load times."""
    total = QUICK_TOTAL if context.quick else TOTAL
    require_space(context.work, total * 5 // 4)
    count = total // CHUNK
    names = keys("checksum", count)
    with ExitStack() as stack:
        arms = {}
        for where, shift in MEMORIES.items():
            context.say(f"storing, {where}")
            memory = Memory2D(count, CHUNK, shift)
            session = stack.enter_context(Session(_config(context.work, where, total), memory))
            session.store(names)
            session.load(names, check=True)
            for verify in (False, True):
                arms[f"{where}, {'verified' if verify else 'not verified'}"] = partial(_load, session, names, verify)
        found = interleave(arms, context.rounds + 8, lambda arm: context.say(f"loading: {arm}"))
    series = {name: Series.of(values, "s") for name, values in found.items()}
    ratios = {
        where: series[f"{where}, verified"].median / series[f"{where}, not verified"].median for where in MEMORIES
    }
    details = {
        "bytes": total,
        "chunk_bytes": CHUNK,
        "stripe_bytes": STRIPE,
        "by_memory": ratios,
        "seconds": medians(series),
    }
    return Measurement({"checksum_overhead": max(ratios.values())}, details)


def _load(session: Session, names: list[bytes], verify: bool) -> float:
    return session.load(names, verify=verify).seconds


def _config(work: Path, where: str, total: int) -> PoolConfig:
    device = {"name": "disk", "kind": "file", "path": work / f"checksum-{where}.kv", "size": total + 32 * MIB}
    return load_config({"path": work / f"checksum-{where}", "stripe": STRIPE, "devices": [device]}, env={})
