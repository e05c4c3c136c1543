"""compute-sanitizer finds no bad access and no race in any kernel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

CASES = Path(__file__).with_name("sanitizer_cases.py")
PLACES = ("/usr/local/cuda/bin", "/opt/nvidia/bin")
CLEAN = {"memcheck": "ERROR SUMMARY: 0 errors", "racecheck": "RACECHECK SUMMARY: 0 hazards"}


def sanitize(tool, *arguments):
    """The exit status and the output of the cases under one of compute-sanitizer's tools."""
    program = shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ["PATH"], *PLACES]))
    if program is None:
        pytest.skip("needs compute-sanitizer, which is not installed here")
    # Each tensor an allocation of its own, so that the byte after its end belongs to nobody.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [program, "--tool", tool, "--error-exitcode", "9", sys.executable, str(CASES), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    output = done.stdout + done.stderr
    if "Device not supported" in output:
        pytest.skip("compute-sanitizer does not support this device or its sandbox")
    return done.returncode, output


@pytest.mark.parametrize("tool", CLEAN)
def test_nothing_is_found(tool):
    status, output = sanitize(tool)
    assert status == 0, output[-5000:]
    assert CLEAN[tool] in output, output[-5000:]


def test_a_planted_store_past_the_end_is_found():
    status, output = sanitize("memcheck", "--planted")
    assert status != 0
    assert "Invalid __global__ write" in output, output[-5000:]
