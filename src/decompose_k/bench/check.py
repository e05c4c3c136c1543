"""Random operands of a case, and the error of every variant against fp64 beside torch's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from decompose_k import reference
from decompose_k.bench.rows import describe_dtypes
from decompose_k.bench.variants import Variant, variants_of
from decompose_k.dtypes import FLOATS, dtype_name
from decompose_k.epilogue import apply_activation
from decompose_k.shapes import OPERAND_LAYOUTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from decompose_k.bench.cases import Case

# The truth is summed over K in pieces, so that no fp64 copy of a large operand is made.
_TRUTH_CHUNK = 1 << 18


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
        x = _random(shape.k, shape.n, shape.b_dtype, "row", device, generator)
        return x.T, x
    a_layout, b_layout = OPERAND_LAYOUTS[shape.layout]
    a = _random(shape.m, shape.k, shape.a_dtype, a_layout, device, generator)
    return a, _random(shape.k, shape.n, shape.b_dtype, b_layout, device, generator)


def truth(case: Case, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """activation(a @ b) in fp64."""
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64, device=a.device)
    for start in range(0, a.shape[1], _TRUTH_CHUNK):
        piece = slice(start, start + _TRUTH_CHUNK)
        total += reference.truth(a[:, piece], b[piece])
    return apply_activation(total, case.activation)


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of the expectation (over 1 where that is zero)."""
    norm = torch.linalg.vector_norm(expected).item()
    return float(torch.linalg.vector_norm(result.double() - expected).item() / (norm or 1.0))


def check(case: Case, variants: Sequence[Variant], a: torch.Tensor, b: torch.Tensor) -> list[Checked]:
    """Each variant's error; allowed is twice the first one's (torch's own), but at least what one rounding costs."""
    expected = truth(case, a, b)
    errors = [relative_error(variant.call(a, b), expected) for variant in variants]
    bound = max(2 * errors[0], torch.finfo(case.shape.out_dtype).eps / 2)
    return [Checked(case, variant, error, errors[0], bound) for variant, error in zip(variants, errors, strict=True)]


def check_case(case: Case, device: torch.device, *, seed: int = 0) -> list[Checked]:
    """Check the default variants of a case on random operands."""
    a, b = make_inputs(case, device, torch.Generator(device).manual_seed(seed))
    return check(case, variants_of(case, device), a, b)


def _random(
    rows: int,
    columns: int,
    dtype: torch.dtype,
    layout: str,
    device: torch.device,
    generator: torch.Generator,
) -> torch.Tensor:
    size = (columns, rows) if layout == "column" else (rows, columns)
    sampled = dtype if dtype in FLOATS and device.type == "cuda" else torch.float32
    matrix = torch.randn(size, dtype=sampled, device=device, generator=generator).to(dtype)
    return matrix.T if layout == "column" else matrix
