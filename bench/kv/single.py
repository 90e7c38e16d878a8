"""One file device against fio on the same file: `single_device_vs_fio`.

Stripes of 1 MiB, loads straight into page-aligned registered memory, without verification. fio reads the same region
of the same file with io_uring and O_DIRECT, same block size, same depth: with registered buffers and without, and,
where they can be reserved, with registered buffers on huge pages (ours are, see `storage/huge_pages.py`). The fastest
of its medians is the peer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from forebay.bench.fio import fio_read, reserved_huge_pages
from forebay.bench.kv.session import Memory2D, Session, keys
from forebay.bench.rig import require_space
from forebay.bench.rounds import Series, interleave
from forebay.bench.suite import Context, Measurement, medians
from forebay.storage.config import BLOCK, PoolConfig, load_config

MIB = 1 << 20
CHUNK = 4 * MIB
STRIPE = 1 * MIB
DEPTH = 32
TOTAL, QUICK_TOTAL = 2048 * MIB, 768 * MIB
HUGE = {"fixed_buffers": True, "huge_pages": True}
FIO = {
    "fio": {"fixed_buffers": False},
    "fio, registered buffers": {"fixed_buffers": True},
    "fio, registered buffers, huge pages": HUGE,
}


def measure(context: Context) -> Measurement:
    """The ratio of the median bandwidths."""
    total = QUICK_TOTAL if context.quick else TOTAL
    require_space(context.work, total + 64 * MIB)
    context.say("writing one device")
    memory = Memory2D(total // CHUNK, CHUNK)
    names = keys("single", memory.rows)
    file = context.work / "single.kv"
    with Session(_config(context.work, file, total), memory) as session:
        session.store(names)
        session.load(names, check=True)
        with reserved_huge_pages((DEPTH + 4) * STRIPE) as huge:
            arms: dict[str, Callable[[], float]] = {"forebay": lambda: total / session.load(names).seconds}
            arms |= {name: partial(_fio, file, total, **way) for name, way in FIO.items() if huge or way != HUGE}
            found = interleave(arms, context.rounds, lambda arm: context.say(f"reading: {arm}"))
    series = {name: Series.of(values, "B/s") for name, values in found.items()}
    peer = max(series[name].median for name in arms if name != "forebay")
    details = {
        "bytes": total,
        "stripe_bytes": STRIPE,
        "chunk_bytes": CHUNK,
        "depth": DEPTH,
        "bandwidth": medians(series),
    }
    return Measurement({"single_device_vs_fio": series["forebay"].median / peer}, details)


def _config(work: Path, file: Path, total: int) -> PoolConfig:
    device = {"name": "disk", "kind": "file", "path": file, "size": total + 32 * MIB, "depth": DEPTH}
    pool = {"path": work / "single-pool", "stripe": STRIPE, "verify": False, "devices": [device]}
    return load_config(pool, env={})


def _fio(file: Path, total: int, *, fixed_buffers: bool, huge_pages: bool = False) -> float:
    return fio_read(
        file,
        size=total,
        offset=BLOCK,
        block=STRIPE,
        depth=DEPTH,
        fixed_buffers=fixed_buffers,
        huge_pages=huge_pages,
    ).bandwidth
