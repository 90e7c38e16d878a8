"""The rules that keep the suite simple, checked on the sources.

Dependencies point one way: cli, bench -> vllm_ext, sglang_ext, launcher -> diffusion, compression, storage -> kernels.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = (
    ("kernels",),
    ("diffusion", "compression", "storage"),
    ("vllm_ext", "sglang_ext", "launcher"),
    ("bench",),
    ("cli",),
)
LAYER = {package: number for number, packages in enumerate(LAYERS) for package in packages}
PACKAGES = sorted(package for package in LAYER if (ROOT / package).is_dir())
ENGINES = {"vllm", "sglang"}
ENGINE_FREE = {"kernels", "storage", "diffusion", "compression"}
LAZY_IN_STORAGE = {"torch", "cuda", "spdk", "cupy"}

MAX_LINES = 500
LONGER: set[str] = set()
"""Files that may be longer than `MAX_LINES`, each with a reason beside it."""


class Import(NamedTuple):
    file: str
    package: str
    """The package of ours that imports."""
    target: str
    """Dotted name of what it imports."""
    top: bool
    """Whether it happens when the module is imported."""

    @property
    def root(self) -> str:
        return self.target.split(".")[0]


def sources(folder: str) -> list[Path]:
    return sorted(path for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts)


def find_imports(package: str, file: str, code: str) -> Iterator[Import]:
    tree = ast.parse(code)
    lazy = {id(node) for inner in ast.walk(tree) if is_lazy(inner) for node in ast.walk(inner)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            names = [f"{base}.{alias.name}" if base == "forebay" else base for alias in node.names]
        else:
            continue
        yield from (Import(file, package, name, id(node) not in lazy) for name in names)


def is_lazy(node: ast.AST) -> bool:
    """A function, or `if TYPE_CHECKING`."""
    checking = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    return checking or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)


def problems(one: Import) -> Iterator[str]:
    where = f"{one.file} imports {one.target}"
    if one.root == "":
        yield f"{where}: write the full name, forebay.{one.package}..."
    if one.root in LAYER:
        yield f"{where} by its bare name: write forebay.{one.target}"
    if one.root == "forebay":
        other = one.target.split(".")[1]
        if other != one.package and LAYER[other] >= LAYER[one.package]:
            yield f"{where}: {one.package} must not depend on {other}"
    if one.root in ENGINES and one.package in ENGINE_FREE:
        yield f"{where}: only the adapters, bench and cli may know an engine"
    if one.package == "storage" and one.top and one.root in LAZY_IN_STORAGE:
        yield f"{where} at module top: import it inside the function that needs it"


@pytest.mark.parametrize("package", PACKAGES)
def test_dependencies_point_one_way(package):
    found = [
        problem
        for path in sources(package)
        for one in find_imports(package, str(path.relative_to(ROOT)), path.read_text())
        for problem in problems(one)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("package", "code", "allowed"),
    [
        ("storage", "from forebay.vllm_ext import spec", False),
        ("storage", "from forebay import vllm_ext", False),
        ("storage", "def f():\n    import vllm.v1", False),
        ("storage", "import torch", False),
        ("storage", "def f():\n    import torch", True),
        ("storage", "from . import plan", False),
        ("storage", "import storage.plan", False),
        ("storage", "from forebay.diffusion import x", False),
        ("vllm_ext", "import vllm, torch\nfrom forebay.storage.pool import Pool", True),
        ("vllm_ext", "def f():\n    from forebay.bench import models", False),
        ("cli", "from forebay.bench import kv\nfrom forebay.storage import pool", True),
        ("bench", "from forebay.cli import app", False),
    ],
)
def test_the_rule_sees(package, code, allowed):
    assert allowed == (not [problem for one in find_imports(package, "x.py", code) for problem in problems(one)])


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_are_complete(package):
    assert (ROOT / package / "py.typed").is_file()
    folders = {path.parent for path in sources(package)}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_no_package_for_the_namespace_itself():
    assert not (ROOT / "forebay").exists()


def test_files_are_short():
    paths = [path for folder in (*PACKAGES, "tests") for path in sources(folder)]
    paths += [path for package in PACKAGES for path in (ROOT / package).rglob("*.[ch]")]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in paths}
    assert {name for name, lines in lengths.items() if lines > MAX_LINES} == LONGER


def test_no_paths_of_one_machine():
    folders = (*PACKAGES, "tests", "docs", "requirements", "tools", ".ci")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    paths += [path for path in ROOT.iterdir() if path.is_file() and path.name != ".git"]
    text = {".py", ".pyi", ".c", ".h", ".md", ".yml", ".yaml", ".toml", ".lock", ".sh", ".json", ".txt", ""}
    private = re.compile(r"(?<![\w.])/(?:work|root|Users|home)/\w")
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in paths
        if path.suffix in text and "__pycache__" not in path.parts
        for match in private.finditer(path.read_text(errors="ignore"))
    ]
    assert not found, "\n".join(found)
