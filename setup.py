"""Packages and the native extension; everything else about the distribution is in pyproject.toml.

Every top-level folder below is one package of the `forebay` namespace. Sub-packages and C sources are found,
not listed, so a new one needs no edit here.
"""

from __future__ import annotations

import glob

from setuptools import Extension, find_packages, setup

FOLDERS = ("kernels", "storage", "compression", "diffusion", "vllm_ext", "cli", "bench")
PACKAGES = [f"forebay.{top}" for top in FOLDERS] + [
    f"forebay.{top}.{sub}" for top in FOLDERS for sub in find_packages(top)
]


def native(name: str, folder: str, *flags: str) -> Extension:
    """The extension made of all C sources in `folder`; Python's stable ABI from 3.11."""
    return Extension(
        name,
        sources=sorted(glob.glob(f"{folder}/*.c")),
        depends=sorted(glob.glob(f"{folder}/*.h")),
        define_macros=[("Py_LIMITED_API", "0x030b0000")],
        py_limited_api=True,
        extra_compile_args=["-O3", "-std=c11", "-Wall", "-Wextra", *flags],
        extra_link_args=list(flags),
    )


# -fno-wrapv takes back a flag of Python's with which compilers do not unroll the loops of the kernels; the last one
# keeps them from calling memset for a dozen sums.
MATHS = ("-fopenmp", "-ffp-contract=fast", "-fno-wrapv", "-fno-tree-loop-distribute-patterns")
NATIVE = [
    native("forebay.storage.device._native", "storage/device/native", "-pthread"),
    native("forebay.kernels._cpu", "kernels/native", *MATHS),
]

setup(
    packages=PACKAGES,
    package_dir={f"forebay.{name}": name for name in FOLDERS},
    include_package_data=False,
    package_data={f"forebay.{name}": ["py.typed"] for name in FOLDERS},
    ext_modules=NATIVE,
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
