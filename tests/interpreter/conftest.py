"""Kernels run here as Python, which must be settled before `triton.jit` sees the first of them."""

from __future__ import annotations

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    raise pytest.UsageError("tests/interpreter needs a process of its own: TRITON_INTERPRET=1 pytest tests/interpreter")


def pytest_configure(config):
    # NumPy, which stands in for the GPU here, remarks on the infinities and NaNs that are tested on purpose.
    config.addinivalue_line("filterwarnings", "ignore:(invalid value|overflow) encountered:RuntimeWarning")


@pytest.fixture(autouse=True)
def faithful_interpreter(monkeypatch):
    """bf16 by value, and NaN as on a GPU; see faithful.py."""
    import faithful

    faithful.patch(monkeypatch)
