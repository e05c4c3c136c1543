"""What the tests of guarded calls share: operands, calls that warm the guards, and calls that have none."""

from __future__ import annotations

import pytest
import torch

import decompose_k as dk
from decompose_k import calls
from decompose_k.arguments import LINEAR, MATMUL
from decompose_k.calls import CALLS
from decompose_k.config import Config
from decompose_k.execute import Shortcuts
from decompose_k.guards import guard

BF16 = torch.bfloat16
MM = Config("mm")
# What a call has beside its tensors, by name and as it is by default.
DEFAULTS = (1.0, 1.0, None, None, None, False, False, None, "auto", None)
NAMES = (
    *("alpha", "beta", "activation", "out_dtype", "precision"),
    *("batch_invariant", "static_b", "split_k", "backend", "config"),
)


def product(a, b, bias, m):
    return a @ b


def torch_has_guards():
    a, b = torch.ones(1, 1), torch.ones(1, 1)
    return guard(product, a, b, None, 1, (1, 1), by_address=False, settings=(None, None)) is not None


needs_guards = pytest.mark.skipif(not torch_has_guards(), reason="this torch has no such guards")


def operands(m=6, n=24, k=64, dtype=torch.float32):
    generator = torch.Generator().manual_seed(m * n * k)
    return tuple(torch.randn(*shape, generator=generator).to(dtype) for shape in ((m, k), (k, n)))


def warm(*arguments, call=dk.matmul, **options):
    for _ in range(3):
        result = call(*arguments, **options)
    return result


def warm_blindly(*arguments, bias=None, call=dk.matmul, by_address=False, **options):
    """Have like calls served by a shortcut that nothing but the guards watches over, and that gives NaN.

    On a CPU the real ones are torch's own functions, which see modes, transforms and gradients by themselves.
    """
    a, b = arguments
    names = LINEAR if call is dk.linear else MATMUL
    values = [options.get(name, default) for name, default in zip(NAMES, DEFAULTS, strict=True)]

    def blind(a, b, bias, m):
        return torch.full((m, b.shape[0] if names is LINEAR else b.shape[1]), float("nan"))

    def blind_directly(a, b, bias=None):
        return blind(a, b, bias, a.shape[0])

    key = calls.call_key(a, b, bias, *values, names)
    assert key is not None
    CALLS.keeper(key)(Shortcuts(blind, blind, blind_directly, blind_directly, by_address))
    for _ in range(2):
        assert call(a, b, bias=bias, **options).isnan().all()
    assert len(CALLS.guarded) == 1


def by_the_long_way(*arguments, call=dk.matmul, **options):
    CALLS.cache_clear()
    return call(*arguments, **options)


A, B = operands()
