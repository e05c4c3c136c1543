"""Deterministic Decompose-K (split-K) matrix products for PyTorch: a small output, a long K, a fused epilogue."""

import importlib as _importlib
from typing import TYPE_CHECKING as _TYPE_CHECKING

from decompose_k import cache
from decompose_k._version import __version__
from decompose_k.api import linear, matmul
from decompose_k.config import Config
from decompose_k.device import Device
from decompose_k.explain import Candidate, Explanation, explain
from decompose_k.plan import Plan, plan
from decompose_k.problem import Problem
from decompose_k.record import Recording, record
from decompose_k.tuner import Tuned, tune
from decompose_k.verify import Check, verify
from decompose_k.warm import warmup

__all__ = [
    "Candidate",
    "Check",
    "Config",
    "Device",
    "Explanation",
    "Plan",
    "Problem",
    "Recording",
    "Tuned",
    "__version__",
    "cache",
    "explain",
    "linear",
    "matmul",
    "plan",
    "record",
    "tune",
    "verify",
    "warmup",
]


if _TYPE_CHECKING:
    from decompose_k import inductor as inductor
else:

    def __getattr__(name: str) -> object:
        # torch's compiler takes a second to import, which only those who compile should spend.
        if name == "inductor":
            return _importlib.import_module("decompose_k.inductor")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
