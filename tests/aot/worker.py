"""Compiles, in a process of its own, what a launcher would launch, and says what each kernel takes.

Reads one request a line, `{"target": ..., "launcher": "module:function", "arguments": {...}}`, and answers each with
one line: `{"kernels": [...]}` or `{"error": ...}`. LLVM aborts the whole process on some inputs: hence a process apart.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from targets import TARGETS, Target

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
MAX_GRID = (2**31 - 1, 2**16 - 1, 2**16 - 1)
# Registers that one thread of an NVIDIA GPU can have.
MOST_REGISTERS = 255


class TargetDriver:
    """A Triton driver that names a target and owns no device, one device index a target so that caches stay apart."""

    def __init__(self, target: Target) -> None:
        self._target = GPUTarget(target.backend, target.arch, target.warp_size)
        self._index = list(TARGETS).index(target.name)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._index

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_launches(target: Target, launcher: str, arguments: dict[str, object]) -> list[dict[str, object]]:
    """Run a launcher with every launch turned into a compilation; the facts about each kernel, in launch order.

    `stack` is what the kernel stores to the stack, in bytes a thread (on AMD, in registers), and `spills` what it would
    still store if the compiler gave a thread all the registers that there are.
    """
    module, function = launcher.split(":")
    launched = []
    run = JITFunction.run

    def compile_only(self: JITFunction, *args: object, grid: tuple[int, ...], warmup: bool, **kwargs: object) -> object:
        if callable(grid):
            raise TypeError(f"{self.__name__}: the harness needs the grid as a tuple")
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        facts = _facts(self.__name__, kernel, grid)
        if facts["stack"] and target.backend == "cuda":
            # Left to itself, the assembler may put a word on the stack to fit one more program on a multiprocessor.
            roomy = run(self, *args, grid=grid, warmup=True, maxnreg=MOST_REGISTERS, **kwargs)
            facts["spills"] = _nvidia_usage(roomy)[1]
        launched.append(facts)
        return kernel

    triton.runtime.driver.set_active(TargetDriver(target))
    JITFunction.run = compile_only
    try:
        getattr(importlib.import_module(module), function)(target, **arguments)
    finally:
        JITFunction.run = run
    return launched


def _facts(name: str, kernel: object, grid: tuple[int, ...]) -> dict[str, object]:
    registers, stack = _nvidia_usage(kernel) if "cubin" in kernel.asm else _amd_usage(kernel)
    return {
        "name": name,
        "grid": list(grid),
        "grid_fits": all(1 <= size <= limit for size, limit in zip(grid, MAX_GRID, strict=False)),
        "shared": kernel.metadata.shared,
        "registers": registers,
        "stack": stack,
        "spills": stack,
        "waits": "griddepcontrol.wait" in kernel.asm.get("ptx", ""),
    }


def _nvidia_usage(kernel: object) -> tuple[int, int]:
    """Registers a thread and bytes spilled a thread."""
    usage = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", _cuobjdump(kernel, "-res-usage"))
    local_bytes = int(usage[2]) + int(usage[3])
    # The assembler may reserve a few bytes of stack that nothing uses: only a store to it (STL) is a spill.
    is_spill = local_bytes > 0 and re.search(r"\bSTL\b", _cuobjdump(kernel, "-sass"))
    return int(usage[1]), local_bytes if is_spill else 0


def _cuobjdump(kernel: object, option: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(kernel.asm["cubin"])
        command = [CUOBJDUMP, option, cubin]
        # The disassembler is found by the search path, beside the tool itself.
        environment = os.environ | {"PATH": f"{CUOBJDUMP.parent}{os.pathsep}{os.environ['PATH']}"}
        return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout


def _amd_usage(kernel: object) -> tuple[int, int]:
    text = kernel.asm["amdgcn"]
    count = {key: int(re.search(rf"\.{key}:\s+(\d+)", text)[1]) for key in ("vgpr_count", "vgpr_spill_count")}
    return count["vgpr_count"], count["vgpr_spill_count"]


def _answer(line: str) -> dict[str, object]:
    request = json.loads(line)
    try:
        return {"kernels": compile_launches(TARGETS[request["target"]], request["launcher"], request["arguments"])}
    except Exception:  # noqa: BLE001 - whatever a compiler raises is the answer
        return {"error": traceback.format_exc(limit=-6)}


def main() -> None:
    # Compilers write to the standard output whenever they like; the answers go to a copy of it that only we know.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        answers.write(json.dumps(_answer(line)) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
