"""How the native engine is built: used by setup.py, and runnable to build in place.

    python storage/device/native/extension.py
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).resolve().parent
NAME = "forebay.storage.device._native"
SOURCES = sorted(path.name for path in HERE.glob("*.c"))
MACROS = [("Py_LIMITED_API", "0x030b0000")]
COMPILE_ARGS = ["-O3", "-std=gnu11", "-pthread", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-cast-function-type"]
LINK_ARGS = ["-pthread"]


def build_in_place(*extra: str) -> Path:
    """Compile `_native.abi3.so` beside the Python files; `extra` are more compiler flags."""
    target = HERE.parent / "_native.abi3.so"
    defines = [f"-D{name}={value}" for name, value in MACROS]
    include = ["-I", sysconfig.get_paths()["include"]]
    command = ["gcc", "-shared", "-fPIC", *COMPILE_ARGS, *defines, *include, *extra, *SOURCES, "-o", str(target)]
    subprocess.run(command, cwd=HERE, check=True)
    return target


if __name__ == "__main__":
    print(build_in_place(*sys.argv[1:]))
