"""The launches that are compiled: what the heuristics would choose for a spread of problems on each target."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from decompose_k.config import Config
from decompose_k.dtypes import dtype_name
from decompose_k.epilogue import ACTIVATIONS
from decompose_k.heuristics import candidates
from decompose_k.problem import Problem
from targets import TARGETS, Target

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

_SEED, _ROUTER = (16, 16, 8192), (16, 256, 7168)
# (shape, operand dtypes, everything else): every dtype pair, precision, layout, kernel and launch at least once.
_PROBLEMS = (
    (_SEED, BF16, BF16, {"activation": "relu"}),
    ((64, 64, 32768), BF16, BF16, {"activation": "relu"}),
    ((48, 48, 24576), FP16, FP16, {"activation": "silu", "bias_dtype": FP16}),
    ((7, 13, 1009), BF16, BF16, {"a_layout": "strided", "b_layout": "strided", "bias_dtype": FP32}),
    ((256, 256, 8192), FP16, FP16, {"a_layout": "column"}),
    ((100, 100, 10001), FP16, FP16, {}),
    ((64, 64, 8192), BF16, FP16, {}),
    ((1, 256, 7168), BF16, BF16, {"b_layout": "column", "out_dtype": FP32}),
    ((2, 128, 2880), FP16, FP16, {"b_layout": "column", "activation": "sigmoid", "static_b": True}),
    ((64, 1, 4096), BF16, BF16, {"b_layout": "column", "bias_dtype": BF16}),
    (_ROUTER, BF16, BF16, {"b_layout": "column", "out_dtype": FP32}),
    (_ROUTER, BF16, BF16, {"b_layout": "column", "out_dtype": FP32, "static_b": True}),
    (_ROUTER, BF16, BF16, {"b_layout": "column", "out_dtype": FP32, "batch_invariant": True}),
    ((64, 256, 7168), BF16, BF16, {"b_layout": "column", "out_dtype": FP32, "static_b": True}),
    ((512, 384, 7168), BF16, BF16, {"b_layout": "column", "out_dtype": FP32}),
    ((64, 24, 28672), BF16, FP32, {"b_layout": "column"}),
    ((16, 256, 3072), BF16, FP32, {"b_layout": "column", "static_b": True}),
    ((16, 128, 6144), FP32, FP16, {"activation": "gelu"}),
    ((1, 64, 4096), BF16, FP32, {"b_layout": "column"}),
    (_SEED, FP32, FP32, {"activation": "tanh"}),
    ((64, 64, 8192), FP32, FP32, {"activation": "gelu_tanh", "bias_dtype": FP32}),
    ((64, 64, 32768), FP32, FP32, {"precision": "ieee"}),
    ((32, 32, 16384), FP32, FP32, {"precision": "tf32x3"}),
    ((64, 64, 8192), FP32, FP32, {"precision": "tf32", "b_layout": "column"}),
    (_ROUTER, FP32, FP32, {"b_layout": "column", "batch_invariant": True}),
    ((2, 256, 4096), FP32, FP32, {"b_layout": "column", "static_b": True}),
    ((32, 32, 8192), FP64, FP64, {"activation": "relu", "bias_dtype": FP64}),
    ((64, 64, 16384), FP64, FP64, {"a_layout": "column"}),
    ((1, 32, 4096), FP64, FP64, {"b_layout": "column"}),
)


@dataclass(frozen=True)
class Launch:
    """One call of the engine on one target."""

    target: str
    problem: Problem
    config: Config
    rank: str
    scaled: bool = False
    wide: bool = False

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of `launches.engine`, ready for JSON."""
        described = {"problem": self.problem.to_json(), "config": self.config.to_json()}
        return described | {"scaled": self.scaled, "wide": self.wide}

    def __str__(self) -> str:
        problem = self.problem
        dtypes = f"{dtype_name(problem.a_dtype)}x{dtype_name(problem.b_dtype)}"
        flags = [name for name in ("static_b", "batch_invariant") if getattr(problem, name)]
        flags += [name for name in ("scaled", "wide") if getattr(self, name)]
        shape = f"{problem.m}x{problem.n}x{problem.k}"
        config = f"{self.config.kernel}-{self.config.input_precision}"
        return "-".join([self.target, dtypes, shape, config, *flags, self.rank])


def problems() -> Iterator[Problem]:
    """The spread of problems, plus one for each activation that no other has."""
    for shape, a_dtype, b_dtype, rest in _PROBLEMS:
        yield Problem.make(*shape, a_dtype, b_dtype=b_dtype, **rest)


def compiled_candidates(problem: Problem, target: Target) -> list[Config]:
    """What the heuristics rank, without torch's own kernels, which are compiled already."""
    return [config for config in candidates(problem, target.device) if config.backend == "triton"]


def shipped() -> list[Launch]:
    """For every target and problem the first candidate, and another whose place in the ranking differs each time.

    On AMD, where no kernel has spilled yet, the other is for every second problem only.
    """
    launches = []
    for name, target in TARGETS.items():
        for place, problem in enumerate(problems()):
            ranked = compiled_candidates(problem, target)
            launches += [Launch(name, problem, config, "first") for config in ranked[:1]]
            if len(ranked) > 1 and (target.device.vendor == "nvidia" or place % 2 == 0):
                other = 1 + (7 * place + len(launches)) % (len(ranked) - 1)
                launches.append(Launch(name, problem, ranked[other], f"rank{other}"))
    return launches + list(itertools.chain.from_iterable(_rare(name) for name in TARGETS))


def _rare(name: str) -> Iterator[Launch]:
    """Forms that no first choice has: the tile reducer, scaled epilogues and offsets past 2^31 elements."""
    plain = Problem.make(*_SEED, BF16, bias_dtype=FP32, activation="gelu_tanh")
    config, *_ = compiled_candidates(plain, TARGETS[name])
    yield Launch(name, plain, replace(config, reducer="tile"), "tile_reducer")
    yield Launch(name, plain, config, "first", scaled=True)
    yield Launch(name, plain, config, "first", wide=True)


def untested_activations() -> set[str]:
    """Activations that no launch uses."""
    return set(ACTIVATIONS) - {problem.activation for problem in problems()}
