"""These tests need a GPU that launches dependently; elsewhere they are left out, and the summary says so."""

from __future__ import annotations

import pytest
import torch

from decompose_k.device import Device


@pytest.fixture(autouse=True)
def hopper(request):
    """The current GPU."""
    if torch.device(request.config.getoption("--device")).type != "cuda":
        pytest.skip("needs --device cuda")
    if not Device.of("cuda").has_dependent_launch:
        pytest.skip(f"needs programmatic dependent launch, which {Device.of('cuda').name} lacks")
