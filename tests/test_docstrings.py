"""Every example in a docstring runs and prints what it says."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import decompose_k

PUBLIC = ("matmul", "linear", "plan", "explain", "record", "tune", "verify", "warmup")
MODULES = [
    f"decompose_k.{module.name}"
    for module in pkgutil.iter_modules(decompose_k.__path__)
    if module.name not in ("cli", "bench", "kernels")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0


@pytest.mark.parametrize("name", PUBLIC)
def test_public_functions_have_an_example_and_say_what_they_raise(name):
    documentation = getattr(decompose_k, name).__doc__
    assert ">>> " in documentation
    assert "Raises:" in documentation
