"""Which products are measured: cases made from the corpus or from explicit shapes, and what a machine can bear."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from decompose_k.dtypes import dtype_name
from decompose_k.problem import Problem
from decompose_k.shapes import Shape, suite

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

CUSTOM = "custom"
# The study behind the seed grid measured a fused relu.
SUITE_ACTIVATIONS = {"seed": "relu"}
# The rest of a demo beside its seed grid: (suite, name, values of M).
_DEMO = (
    ("router", "DeepSeek-V3/R1/V3.2", (1, 16, 64)),
    ("router", "Kimi-K2", (1, 16)),
    ("router", "gpt-oss-120b", (1, 16, 64)),
    ("router", "MiniMax-M2", (1, 16)),
    ("lora", "LoRA shrink r=16 (Llama-3-8B down_proj)", (1, 16, 64)),
    ("lora", "LoRA shrink r=64 (70B down_proj)", (16, 64)),
    ("mhc", "mHC pre-norm (DeepSeek-V4-Flash)", (1, 16, 64)),
    ("mhc", "mHC pre-norm (DeepSeek-V4-Pro)", (16, 64)),
)


@dataclass(frozen=True, slots=True)
class Case:
    """A shape, the activation that follows it, and whether b is measured as a static weight as well."""

    shape: Shape
    activation: str | None = None
    static_weight: bool = False

    def problem(self, device_type: str, *, static_b: bool = False) -> Problem:
        """The case as a problem on a device type."""
        return self.shape.problem(device_type, activation=self.activation, static_b=static_b)

    @property
    def bytes(self) -> int:
        """Least bytes to move; a Gram matrix has one operand."""
        problem = self.problem("cpu")
        shared = problem.k * problem.n * problem.b_dtype.itemsize if self.shape.is_gram else 0
        return problem.bytes - shared

    @property
    def flops(self) -> int:
        """Floating-point operations of the product, without counting on a symmetric result."""
        return self.problem("cpu").flops

    def __str__(self) -> str:
        shape = self.shape
        size = f"{shape.m}x{shape.n}x{shape.k}"
        name = size if shape.name == size else f"{shape.name} {size}"
        return f"{shape.suite} {name} {dtype_name(shape.a_dtype)}"


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A case that is not measured, and why."""

    case: Case
    reason: str


def corpus_cases(names: Iterable[str]) -> tuple[Case, ...]:
    """Every case of the named suites of the corpus; raises ValueError for an unknown one."""
    shapes = (shape for name in names for shape in suite(name))
    return tuple(
        Case(shape, SUITE_ACTIVATIONS.get(shape.suite), shape.has_static_weight) for shape in dict.fromkeys(shapes)
    )


def custom_case(
    size: tuple[int, int, int],
    dtype: torch.dtype,
    *,
    b_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    layout: str = "NN",
    activation: str | None = None,
    static_weight: bool = False,
    suite_name: str = CUSTOM,
) -> Case:
    """A case of an explicit shape, outside of the corpus."""
    m, n, k = size
    problem = Problem.make(m, n, k, dtype, b_dtype=b_dtype, out_dtype=out_dtype)
    shape = Shape(f"{m}x{n}x{k}", suite_name, m, n, k, dtype, problem.b_dtype, problem.out_dtype, layout, CUSTOM)
    return Case(shape, activation, static_weight)


def with_dtype(case: Case, dtype: torch.dtype) -> Case:
    """The case with both operands in another dtype, and the result too where it had the operands' dtype."""
    shape = case.shape
    out_dtype = dtype if shape.out_dtype == shape.a_dtype else shape.out_dtype
    return replace(case, shape=replace(shape, a_dtype=dtype, b_dtype=dtype, out_dtype=out_dtype))


def with_rows(cases: Iterable[Case], rows: Sequence[int]) -> tuple[Case, ...]:
    """The cases with other values of M: where M is a batch in place of their own, elsewhere those that have them.

    M is a batch where b is an inference weight. Explicit shapes stay as they are.
    """
    chosen: list[Case] = []
    for case in cases:
        if case.shape.suite == CUSTOM or (not case.shape.has_static_weight and case.shape.m in rows):
            chosen.append(case)
        elif case.shape.has_static_weight:
            chosen += [replace(case, shape=replace(case.shape, m=m)) for m in rows]
    return tuple(dict.fromkeys(chosen))


def demo_cases() -> tuple[Case, ...]:
    """The seed grid, and router, LoRA, mHC and Gram shapes that people run."""
    chosen = [case for case in corpus_cases(["seed"]) if case.shape.status == "definition"]
    for suite_name, name, rows in _DEMO:
        chosen += [case for case in corpus_cases([suite_name]) if case.shape.name == name and case.shape.m in rows]
    return (*chosen, *corpus_cases(["gram"]))


def demo_checks() -> tuple[Case, ...]:
    """A dozen real shapes that show correctness: small and large, every dtype and layout of the demo."""
    cases = demo_cases()
    seed = [case for case in cases if case.shape.suite == "seed"]
    corners = [case for case in seed if case.shape.m in (16, 64) and case.shape.k in (8192, 32768)]
    seen: dict[tuple[str, str], Case] = {}
    for case in cases:
        if case.shape.suite != "seed":
            seen.setdefault((case.shape.suite, case.shape.name), case)
    return (*corners, *list(seen.values())[:8])


def affordable(cases: Sequence[Case], *, max_bytes: int, max_flops: float) -> tuple[list[Case], list[LeftOut]]:
    """Split cases into those within the limits of one call, and those left out with the reason."""
    kept: list[Case] = []
    left_out: list[LeftOut] = []
    for case in cases:
        if case.bytes > max_bytes:
            reason = f"operands of {case.bytes / 1e9:.1f} GB; the limit here is {max_bytes / 1e9:.1f} GB"
            left_out.append(LeftOut(case, reason))
        elif case.flops > max_flops:
            reason = f"{case.flops / 1e9:.0f} Gflop a call; the limit here is {max_flops / 1e9:.0f} Gflop"
            left_out.append(LeftOut(case, reason))
        else:
            kept.append(case)
    return kept, left_out
