"""Random operands of a case, and the error of every variant against fp64 beside torch's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from decompose_k.accuracy import allowed_error, brief, make_operands, random_matrix, relative_error, truth
from decompose_k.bench.rows import describe_dtypes
from decompose_k.bench.variants import variants_of
from decompose_k.dtypes import dtype_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from decompose_k.bench.cases import Case
    from decompose_k.bench.variant import Variant


# An error estimated from 512 outputs is good to 3 %; sets of operands beyond 64 would only cost time.
_JUDGED_OUTPUTS = 512
_MOST_DRAWS = 64


@dataclass(frozen=True, slots=True)
class Broken:
    """A variant that raised, and what: a compiler that is missing, an interface that this torch lacks."""

    case: Case
    variant: Variant
    reason: str

    def __str__(self) -> str:
        return f"{self.case}: {self.variant.label}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Checked:
    """A variant's error against fp64, beside torch's own error and the bound that follows from it."""

    case: Case
    variant: Variant
    error: float
    torch_error: float
    bound: float

    @property
    def passed(self) -> bool:
        """Whether the error is within the bound; NaN is not."""
        return self.error <= self.bound

    @property
    def dtypes(self) -> str:
        """The case's dtypes as rows show them."""
        shape = self.case.shape
        return describe_dtypes(*map(dtype_name, (shape.a_dtype, shape.b_dtype, shape.out_dtype)))

    def __str__(self) -> str:
        return f"{self.case}: {self.variant.label}: error {self.error:.2e}, allowed {self.bound:.2e}"


def make_inputs(case: Case, device: torch.device, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Random operands a [m, k] and b [k, n] of a case, in its layouts; a Gram matrix has both from one x."""
    shape = case.shape
    if shape.is_gram:
        x = random_matrix(shape.k, shape.n, shape.b_dtype, "row", device, generator)
        return x.T, x
    a, b = make_operands(case.problem(device.type), device, generator)
    return a, b


def call_first(
    case: Case, variants: Sequence[Variant], a: torch.Tensor, b: torch.Tensor
) -> tuple[list[Variant], list[Broken]]:
    """Call each variant once, which compiles what is to be compiled; those that work, and those that raised."""
    reasons = [(variant, _failure(variant, a, b)) for variant in variants]
    working = [variant for variant, reason in reasons if reason is None]
    return working, [Broken(case, variant, reason) for variant, reason in reasons if reason is not None]


def check(
    case: Case, variants: Sequence[Variant], input_sets: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> list[Checked]:
    """Each variant's error; allowed is twice the first one's (torch's own), but at least what one rounding costs.

    Where a product has few outputs, several sets of operands are judged together: one output's error is mostly luck.
    """
    shape = case.shape
    draws = input_sets[: _draws(case)]
    expected = torch.stack([truth(a, b, activation=case.activation) for a, b in draws])
    errors = [_error(variant, draws, expected) for variant in variants]
    bound = allowed_error(errors[0], shape.out_dtype, shape.k)
    return [Checked(case, variant, error, errors[0], bound) for variant, error in zip(variants, errors, strict=True)]


def check_case(case: Case, device: torch.device, *, seed: int = 0) -> list[Checked]:
    """Check the default variants of a case on random operands."""
    generator = torch.Generator(device).manual_seed(seed)
    inputs = [make_inputs(case, device, generator) for _ in range(_draws(case))]
    return check(case, variants_of(case, device), inputs)


def _draws(case: Case) -> int:
    return min(_MOST_DRAWS, -(-_JUDGED_OUTPUTS // (case.shape.m * case.shape.n)))


def _failure(variant: Variant, a: torch.Tensor, b: torch.Tensor) -> str | None:
    try:
        variant.call(a, b)
    except Exception as error:  # noqa: BLE001 - a compiler fails in its own ways, and only its variant is lost
        return brief(error)
    return None


def _error(variant: Variant, draws: Sequence[tuple[torch.Tensor, torch.Tensor]], expected: torch.Tensor) -> float:
    if variant.error is not None:
        return max(variant.error(variant.call(a, b), a, b) for a, b in draws)
    # Clones, since a CUDA graph of the variant's own writes every result to the same place.
    return relative_error(torch.stack([variant.call(a, b).clone() for a, b in draws]), expected)
