"""`forebay bench passthrough`: names, what it does without a storage daemon, and its peers' bookkeeping."""

from __future__ import annotations

import importlib
import time
from pathlib import Path

import pytest

from forebay.bench import storage_daemon
from forebay.bench.blocked import BlockedSampler, can_sample
from forebay.bench.passthrough import vhost
from forebay.bench.passthrough.suite import BARS, PARTS, PASSTHROUGH
from forebay.bench.passthrough.vhost import Cost
from forebay.bench.storage_daemon import StorageDaemon, StorageDaemonError
from forebay.bench.suite import run


def test_every_bar_has_a_part_with_a_module() -> None:
    assert sorted(bar.name for bar in BARS) == sorted(name for part in PARTS for name in part.ratios)
    for part in PARTS:
        assert callable(importlib.import_module(f"{PASSTHROUGH.package}.{part.name}").measure)


def test_without_a_storage_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line, under the parts that need it."""
    monkeypatch.setattr(storage_daemon, "DAEMON", "no-such-daemon")
    monkeypatch.setattr(vhost, "QUICK_TOTAL", 4 << 20)
    with pytest.raises(StorageDaemonError, match="apt-get install qemu-system-common"):
        StorageDaemon(tmp_path / "disk", tmp_path / "socket", 4096).start()
    report = run(PASSTHROUGH, tmp_path, quick=True, only=["vhost"])
    assert report["ok"] is False
    assert "no-such-daemon is not installed" in report["errors"]["vhost"]


def test_the_fastest_reader_is_the_peer() -> None:
    costs = {
        "direct": [Cost(1, 0.1, 0)] * 3,
        "vhost": [Cost(2, 0.2, 0.5, 1.5)] * 3,
        "files, 1 threads": [Cost(8, 9, 8)] * 3,
        "files, 4 threads": [Cost(4, 10, 20)] * 3,
    }
    found = vhost._report(costs, 1 << 30)
    assert found.ratios == pytest.approx(
        {
            "vhost_vs_direct_1m_qd4": 0.5,
            "client_cpu_per_gb_vs_file_per_chunk": 0.02,
            "blocked_vs_file_per_chunk": 0.025,
        }
    )
    assert found.details["file_per_chunk"] == "files, 4 threads"


@pytest.mark.skipif(not can_sample(), reason="this kernel does not show system calls")
def test_a_thread_in_poll_waits_and_is_not_blocked() -> None:
    import select
    import threading

    poller, ids = select.poll(), []

    def wait() -> None:
        ids.append(threading.get_native_id())
        poller.poll(600)

    thread = threading.Thread(target=wait)
    thread.start()
    while not ids:
        time.sleep(0.001)
    with BlockedSampler(ids) as blocked, BlockedSampler(ids, polls=True) as waiting:
        time.sleep(0.3)
    thread.join()
    assert blocked.seconds < 0.05
    assert 0.2 < waiting.seconds < 0.4
    assert 0 < blocked.own_cpu_seconds < 0.3
