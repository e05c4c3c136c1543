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


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_nothing_is_found(tool):
    program = shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ["PATH"], *PLACES]))
    if program is None:
        pytest.skip("needs compute-sanitizer, which is not installed here")
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [program, "--tool", tool, "--error-exitcode", "9", sys.executable, str(CASES)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
