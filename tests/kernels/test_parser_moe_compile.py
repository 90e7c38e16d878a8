"""The Triton kernels compiled ahead of time, without a GPU, at the sizes of Qwen1.5-MoE: no default spills."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from forebay.kernels.parser_moe import triton_forward, triton_tuning
from forebay.kernels.parser_moe.triton_backbone import hidden_int8, output_int8
from forebay.kernels.parser_moe.triton_down import down_few, down_many
from forebay.kernels.parser_moe.triton_group import group_pairs
from forebay.kernels.parser_moe.triton_hidden import hidden_few, hidden_many
from forebay.kernels.parser_moe.triton_mix import mix_hidden

ARCHITECTURES = (80, 90, 100)
SHARED_BYTES = 99 * 1024
"""Shared memory of a program on the smallest cards since sm_80 (8.6, 8.9, 12.0)."""
SIZES = {
    "E": 60, "K": 4, "H": 1408, "D": 2048, "W": 1408, "BLOCK_E": 64, "CHUNK": triton_forward.CHUNK,
    "BLOCK_H": triton_forward.MIX_H,
}  # fmt: skip
INTEGERS = {"ids_ptr", "order_ptr", "starts_ptr", "indices_ptr", "offsets_ptr"}
FLOATS = {"weights_ptr", "sums_ptr", "gate_scale_ptr", "up_scale_ptr", "down_scale_ptr"}
INT8 = {"gate_ptr", "up_ptr", "down_ptr"}


class Launch(NamedTuple):
    kernel: Any
    constants: dict[str, Any]
    blocks: triton_tuning.Blocks
    dtype: str


def launch(kernel: Any, blocks: triton_tuning.Blocks, dtype: str, activation: str = "silu", **constants: Any) -> Launch:
    constants |= {"ACTIVATION": activation, "BLOCK_R": blocks.r, "BLOCK_D": blocks.d}
    return Launch(kernel, SIZES | constants, blocks, dtype)


def defaults() -> Iterator[Launch]:
    """The default of every kernel."""
    yield launch(group_pairs, triton_tuning.PLAIN, "bf16")
    yield launch(mix_hidden, triton_tuning.PLAIN, "bf16")
    yield launch(hidden_few, triton_tuning.HIDDEN_FEW[0], "bf16")
    yield launch(down_few, triton_tuning.DOWN_FEW[0], "bf16")
    for block_t in triton_tuning.HIDDEN_MANY:
        yield launch(hidden_many, triton_tuning.HIDDEN_MANY[block_t][0], "bf16", BLOCK_T=block_t)
        yield launch(down_many, triton_tuning.DOWN_MANY[block_t][0], "bf16", BLOCK_T=block_t)
    for block_t in triton_tuning.BACKBONE_INT8:
        yield launch(hidden_int8, triton_tuning.BACKBONE_INT8[block_t][0], "bf16", BLOCK_T=block_t)
        yield launch(output_int8, triton_tuning.BACKBONE_INT8[block_t][0], "bf16", BLOCK_T=block_t)


def variations() -> Iterator[Launch]:
    """float16, and the other activation where registers are scarcest."""
    yield launch(hidden_few, triton_tuning.HIDDEN_FEW[0], "fp16")
    yield launch(down_few, triton_tuning.DOWN_FEW[0], "fp16")
    yield launch(hidden_many, triton_tuning.HIDDEN_MANY[128][0], "fp16", "gelu", BLOCK_T=128)
    yield launch(down_many, triton_tuning.DOWN_MANY[128][0], "fp16", BLOCK_T=128)
    yield launch(hidden_int8, triton_tuning.BACKBONE_INT8[128][0], "fp16", BLOCK_T=128)


def argument(name: str, dtype: str) -> str:
    if name in {"P", "T"}:
        return "i32"
    return "*" + ("i32" if name in INTEGERS else "i8" if name in INT8 else "fp32" if name in FLOATS else dtype)


def compile_kernel(one: Launch, architecture: int) -> Any:
    names = one.kernel.arg_names
    constants = {name: one.constants[name] for name in names if name in one.constants}
    arguments = {name: argument(name, one.dtype) for name in names if name not in constants}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in arguments}
    signature = {name: arguments.get(name, "constexpr") for name in names}
    source = ASTSource(one.kernel, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=one.blocks.options())


def local_bytes(cubin: Path) -> int:
    """Local memory of a thread in a compiled kernel: what Triton counts as spilled registers, and the stack."""
    usage = subprocess.check_output([knobs.nvidia.cuobjdump.path, "-res-usage", cubin], text=True)
    found = dict(re.findall(r"(STACK|LOCAL):(\d+)", usage))
    return int(found["STACK"]) + int(found["LOCAL"])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_default_spills_registers(architecture: int, tmp_path: Path):
    cubin = tmp_path / "kernel.cubin"
    launches = [*defaults(), *(variations() if architecture == 90 else ())]
    with ThreadPoolExecutor(2) as threads:  # the compiler runs without Python's lock
        kernels = list(threads.map(partial(compile_kernel, architecture=architecture), launches))
    for one, kernel in zip(launches, kernels):
        cubin.write_bytes(kernel.asm["cubin"])
        assert local_bytes(cubin) == 0, one
        assert kernel.metadata.shared <= SHARED_BYTES, one


def test_a_spill_is_seen(tmp_path: Path):
    """The instrument itself: blocks far too large for the registers."""
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compile_kernel(launch(hidden_few, triton_tuning.Blocks(32, 512), "bf16"), 80).asm["cubin"])
    assert local_bytes(cubin) > 0
