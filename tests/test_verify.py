"""`verify` passes here, and a broken engine is found and told rather than raised."""

from __future__ import annotations

import pytest
import torch

import decompose_k as dk
from decompose_k import execute, reference
from decompose_k.contract import CHECKS

pytestmark = pytest.mark.contract


def test_the_contract_holds_on_this_machine(device):
    seen = []
    checks = dk.verify(device, quick=True, progress=seen.append)
    failed = [check for check in checks if not check.passed]
    assert failed == []
    assert seen == [check.name for check in checks]
    assert {f"{backend}: {name}" for backend in ("auto", "torch") for name in CHECKS} <= set(seen)
    assert all(check.detail for check in checks)


def wrong_value(result, **options):
    return result * 1.01


def lost_nan(result, **options):
    return torch.nan_to_num(result)


def lost_activation(result, *, activation=None, **options):
    return result - 1 if activation else result


def noise(result, **options):
    return result + torch.rand(()).to(result) * 1e-3 * result.abs()


def sees_m(result, **options):
    return result * (1 + result.shape[0] * torch.finfo(result.dtype).eps) if result.is_floating_point() else result


BREAKS = {
    "accuracy on real shapes": wrong_value,
    "awkward sizes": wrong_value,
    "strides": wrong_value,
    "special values": lost_nan,
    "epilogue": lost_activation,
    "linear": wrong_value,
    "determinism": noise,
    "batch invariance": sees_m,
    "gradients": wrong_value,
    "precision": wrong_value,
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_engine_is_found(name, monkeypatch):
    def broken(config, a, b, *, out=None, **options):
        result = BREAKS[name](reference.torch_matmul(config, a, b, **options), **options)
        return result if out is None else out.copy_(result)

    monkeypatch.setattr(execute, "torch_matmul", broken)
    found = {check.name: check for check in dk.verify("cpu", quick=True)}[f"torch: {name}"]
    assert not found.passed
    assert found.detail


def test_a_crash_is_a_failed_check(monkeypatch):
    def crash(*arguments, **options):
        raise RuntimeError("out of memory\nsecond line")

    monkeypatch.setattr(execute, "torch_matmul", crash)
    checks = {check.name: check for check in dk.verify("cpu", quick=True)}
    assert checks["auto: strides"] == dk.Check("auto: strides", False, "RuntimeError: out of memory")
