"""What a byte costs, against vLLM's own file system tier: `cpu_per_gb_vs_fs_tier`, `blocked_vs_fs_tier`.

Same disk, same chunks (1 and 3 MiB), same calls through vLLM's interface for such tiers. The peer runs with O_DIRECT
and its C extension where it has them, in several settings of threads and of chunks per job; its figure is the best,
for each ratio, of the settings whose bandwidth is within 5% of its highest. Ours is `ForebayTier` with one stripe per
chunk, as the peer has one file per chunk, and without verification, which the peer has not.

Each reads into memory as it gets it in vLLM. The peer's is shared between processes and on small pages; ours is
private, like the KV tensors that the connector reads into, and the transfer engine moves it onto huge pages when it
registers it. What comes from that shows in the details of the long form: `..._ratio_small_pages` has both on the peer's
kind of memory, `..._ratio_huge_pages` both on huge pages. So do ours with verification, and the peer as vLLM uses it,
where the chunks of one request are one job and one thread reads them one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.bench.blocked import can_sample
from forebay.bench.kv.session import Memory2D
from forebay.bench.rig import require_space
from forebay.bench.rounds import Series, interleave
from forebay.bench.suite import Context, Measurement, medians

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadKey

    from forebay.bench.kv.tiers import Cost, Driver

MIB = 1 << 20
CHUNKS = (1 * MIB, 3 * MIB)
TOTAL, QUICK_TOTAL = 768 * MIB, 384 * MIB
SETTINGS = {"4 threads": (4, 1), "8 threads": (8, 1), "16 threads": (16, 1), "8 threads, jobs of 4": (8, 4)}
AS_USED = {"32 threads, one job": (32, 0)}
"""vLLM's default of 16 + 16 threads, all chunks of a request in one job."""
PEER_HUGE = "8 threads, huge pages"
OURS, VERIFIED, OURS_SMALL = "forebay", "forebay, verified", "forebay, small pages"
NEAR_BEST = 0.95
RATIOS = {"cpu_ratio": "cpu_per_gb_vs_fs_tier", "blocked_ratio": "blocked_vs_fs_tier"}


@dataclass(frozen=True)
class _Arm:
    """A tier in one setting."""

    driver: Driver
    names: list[OffloadKey]
    keys_per_job: int

    def load(self) -> Cost:
        return self.driver.load(self.names, self.keys_per_job)

    def blocked(self) -> float:
        return self.driver.blocked(self.names, self.keys_per_job)


def measure(context: Context) -> Measurement:
    """Both ratios: the worse of the two chunk sizes."""
    context.say("importing vLLM")
    from forebay.bench.kv.tiers import fs_tier_facts

    found = Measurement(details={"peer": fs_tier_facts(context.work)})
    require_space(context.work, 3 * TOTAL)
    chunks = {chunk: _measure_chunk(context, chunk) for chunk in CHUNKS}
    found.details |= {f"chunks of {chunk // MIB} MiB": details for chunk, details in chunks.items()}
    for what, name in RATIOS.items():
        if all(what in details for details in chunks.values()):
            found.ratios[name] = max(details[what] for details in chunks.values())
    return found


def _measure_chunk(context: Context, chunk: int) -> dict[str, Any]:
    count = (QUICK_TOTAL if context.quick else TOTAL) // chunk
    arms = _arms(context, count, chunk)
    try:
        costs = interleave(
            {name: arm.load for name, arm in arms.items()}, context.rounds, lambda name: context.say(f"loading: {name}")
        )
        looks: dict[str, list[float]] = {}
        if can_sample():
            looks = interleave(
                {name: arm.blocked for name, arm in arms.items()},
                max(1, context.rounds - 1),
                lambda name: context.say(f"blocked in I/O: {name}"),
            )
    finally:
        for arm in arms.values():
            arm.driver.tier.shutdown()
    gigabytes = count * chunk / 1e9
    return _compare({name: _row(costs[name], looks.get(name, []), gigabytes) for name in arms})


def _arms(context: Context, count: int, chunk: int) -> dict[str, _Arm]:
    """All settings of the peer over one folder of files, and ours over one pool each."""
    from forebay.bench.kv.tiers import Driver, forebay_tier, fs_tier, offload_keys

    context.say(f"storing chunks of {chunk // MIB} MiB")
    small, huge = Memory2D(count, chunk, shared=True), Memory2D(count, chunk)
    names = offload_keys(f"tier/{chunk}", count)
    arms: dict[str, _Arm] = {}
    ours = ((OURS, huge, False), (VERIFIED, huge, True), (OURS_SMALL, small, False))
    for name, memory, verify in ours[:1] if context.quick else ours:
        pool = _pool(context.work / f"{name}, {chunk}", count, chunk, verify)
        arms[name] = _Arm(Driver(partial(forebay_tier, memory, pool), memory), names, count)
        arms[name].driver.store(names)
    for name, (threads, keys_per_job) in (SETTINGS | ({} if context.quick else AS_USED)).items():
        driver = Driver(partial(fs_tier, small, context.work / "fs", threads), small)
        arms[name] = _Arm(driver, names, keys_per_job or count)
    arms["8 threads"].driver.store(names)
    if not context.quick:
        arms[PEER_HUGE] = _Arm(Driver(partial(fs_tier, huge, context.work / "fs", 8), huge), names, 1)
    for arm in arms.values():
        arm.driver.load(names, arm.keys_per_job, check=True)
    return arms


def _pool(folder: Path, count: int, chunk: int, verify: bool) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    device = {
        "name": "disk",
        "kind": "file",
        "path": str(folder / "disk.kv"),
        "size": (count + count // 16 + 2) * chunk,
    }
    return {"path": str(folder), "stripe": chunk, "verify": verify, "devices": [device]}


def _row(costs: list[Cost], looks: list[float], gigabytes: float) -> dict[str, Series]:
    row = {
        "bandwidth": Series.of((cost.bytes / cost.seconds / 1e9 for cost in costs), "GB/s"),
        "cpu": Series.of((cost.cpu_seconds / gigabytes for cost in costs), "s/GB"),
    }
    if looks:
        row["blocked"] = Series.of((seconds / gigabytes for seconds in looks), "s/GB")
    return row


def _compare(rows: Mapping[str, Mapping[str, Series]]) -> dict[str, Any]:
    best = max(rows[name]["bandwidth"].median for name in SETTINGS)
    near = [name for name in SETTINGS if rows[name]["bandwidth"].median >= NEAR_BEST * best]
    result: dict[str, Any] = {"near_best": near}
    for what in ("cpu", "blocked") if "blocked" in rows[OURS] else ("cpu",):
        peer = min(rows[name][what].median for name in near)
        pairs = {"": (OURS, peer)}
        if PEER_HUGE in rows:
            pairs |= {"_small_pages": (OURS_SMALL, peer), "_huge_pages": (OURS, rows[PEER_HUGE][what].median)}
        for suffix, (ours, theirs) in pairs.items():
            if theirs:  # else the load was too short to see anything
                result[f"{what}_ratio{suffix}"] = rows[ours][what].median / theirs
    result["settings"] = {name: medians(row) for name, row in rows.items()}
    return result
