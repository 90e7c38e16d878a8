"""`forebay doctor`: every lack comes with its fix."""

from __future__ import annotations


def test_says_what_this_machine_can_do(forebay):
    done = forebay("doctor")
    assert done.code == 0, done.out
    for check in ("kernel", "io_uring", "O_DIRECT on .", "huge pages", "locked memory", "NUMA", "CUDA", "vllm"):
        assert check in done.out


def test_json(forebay, tmp_path):
    done = forebay("doctor", "--json", str(tmp_path))
    assert done.data["ok"]
    assert {check["status"] for check in done.data["checks"]} <= {"ok", "warning"}
    assert f"O_DIRECT on {tmp_path}" in {check["name"] for check in done.data["checks"]}


def test_reads_the_places_of_a_pool(forebay, tmp_path):
    names = {check["name"] for check in forebay("doctor", "--json", "pool.yaml").data["checks"]}
    assert f"O_DIRECT on {tmp_path / 'ssd0.kv'}" in names


def test_problem_has_a_fix_and_an_exit_code(forebay):
    done = forebay("doctor", "--json", "/proc/nowhere/file")
    assert done.code == 1
    assert not done.data["ok"]
    (problem,) = [check for check in done.data["checks"] if check["status"] == "problem"]
    assert problem["fix"] == "give a path that exists and may be written"
