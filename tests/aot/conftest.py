from __future__ import annotations

import os

import pytest

from compile_pool import CompilePool


@pytest.fixture(scope="session")
def compile_pool():
    with CompilePool(workers=os.cpu_count() or 1) as pool:
        yield pool
