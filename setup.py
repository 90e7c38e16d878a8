"""Packages and the native extension; everything else about the distribution is in pyproject.toml.

Every top-level folder below is one package of the `forebay` namespace. Sub-packages and C sources are found,
not listed, so a new one needs no edit here.
"""

from __future__ import annotations

import glob

from setuptools import Extension, find_packages, setup

FOLDERS = ("kernels", "storage", "compression", "vllm_ext", "cli", "bench")
SOURCES = sorted(glob.glob("storage/device/_native.c") + glob.glob("storage/device/native/*.c"))
HEADERS = sorted(glob.glob("storage/device/native/*.h"))

PACKAGES = [f"forebay.{top}" for top in FOLDERS] + [
    f"forebay.{top}.{sub}" for top in FOLDERS for sub in find_packages(top)
]

NATIVE = Extension(
    "forebay.storage.device._native",
    sources=SOURCES,
    depends=HEADERS,
    define_macros=[("Py_LIMITED_API", "0x030b0000")],
    py_limited_api=True,
    extra_compile_args=["-O3", "-std=c11", "-pthread", "-Wall", "-Wextra"],
    extra_link_args=["-pthread"],
)

setup(
    packages=PACKAGES,
    package_dir={f"forebay.{name}": name for name in FOLDERS},
    include_package_data=False,
    package_data={f"forebay.{name}": ["py.typed"] for name in FOLDERS},
    ext_modules=[NATIVE] if SOURCES else [],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if SOURCES else {},
)
