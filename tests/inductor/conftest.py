"""Every test starts with nothing compiled and leaves the pass turned off and torch's config slot empty."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from support import spy_on_engine


@pytest.fixture(autouse=True)
def nothing_installed():
    """What one test puts into torch's config slot or compiles, no other finds."""
    from torch._inductor import config

    import decompose_k as dk

    torch.compiler.reset()
    assert config.joint_custom_pre_pass is None
    yield
    dk.inductor.disable()
    config.joint_custom_pre_pass = None
    torch.compiler.reset()


@pytest.fixture
def calls(monkeypatch):
    """Shapes of a and b of every product that reaches the engine through the operator."""
    return spy_on_engine(monkeypatch, lambda a, b, _options: (tuple(a.shape), tuple(b.shape)))


@pytest.fixture
def empty_caches(tmp_path, monkeypatch):
    """A cache of compiled graphs that nothing is in yet."""
    from torch._inductor.utils import fresh_cache

    with fresh_cache(dir=str(tmp_path)):
        yield
