"""Check every variant of a case against fp64, then time those that are right, side by side, into rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from decompose_k import reference
from decompose_k.bench.rows import Row, describe_dtypes
from decompose_k.bench.variants import DEFAULT_VARIANTS, Variant, variants_of
from decompose_k.dtypes import FLOATS, dtype_name
from decompose_k.epilogue import apply_activation
from decompose_k.shapes import OPERAND_LAYOUTS
from decompose_k.timing import Timing, make_input_sets, time_variants

if TYPE_CHECKING:
    from collections.abc import Sequence

    from decompose_k.bench.cases import Case
    from decompose_k.bench.machine import Ceilings, Machine

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


@dataclass(frozen=True, slots=True)
class Bench:
    """What all cases of one run share."""

    device: torch.device
    machine: Machine
    ceilings: Ceilings
    repetitions: int = 30
    seconds: float | None = None
    variants: tuple[str, ...] = DEFAULT_VARIANTS
    search: bool = False

    def measure(self, case: Case) -> tuple[list[Row], list[Checked]]:
        """Rows of the variants that are right, and the checks of those that are not, which are not timed."""
        generator = torch.Generator(self.device).manual_seed(0)
        input_sets = make_input_sets(lambda: make_inputs(case, self.device, generator), case.bytes, self.device)
        chosen = variants_of(case, self.device, self.variants)
        if self.search:
            from decompose_k.bench.search import best_of_choices

            chosen = tuple(best_of_choices(case, variant, input_sets, self.device) for variant in chosen)
        checks = check(case, chosen, *input_sets[0])
        right = [checked for checked in checks if checked.passed]
        failures = [checked for checked in checks if not checked.passed]
        if not right:
            return [], failures
        timings = time_variants(
            {checked.variant.name: checked.variant.call for checked in right},
            input_sets,
            self.device,
            bytes_per_set=case.bytes,
            repetitions=self.repetitions,
            seconds=self.seconds,
        )
        rows = [self._row(checked, timings[checked.variant.name]) for checked in right]
        return rows, failures

    def _row(self, checked: Checked, timing: Timing) -> Row:
        case, variant, machine = checked.case, checked.variant, self.machine
        shape = case.shape
        return Row(
            suite=shape.suite,
            name=shape.name,
            status=shape.status,
            m=shape.m,
            n=shape.n,
            k=shape.k,
            a_dtype=dtype_name(shape.a_dtype),
            b_dtype=dtype_name(shape.b_dtype),
            out_dtype=dtype_name(shape.out_dtype),
            layout=shape.layout,
            activation=case.activation,
            static_b=variant.static_b,
            variant=variant.name,
            label=variant.label,
            ours=variant.ours,
            backend=variant.backend,
            config=None if variant.config is None else variant.config.to_json(),
            p20_us=timing.p20_us,
            p50_us=timing.p50_us,
            p80_us=timing.p80_us,
            repetitions=timing.repetitions,
            timing=timing.method,
            error=checked.error,
            torch_error=checked.torch_error,
            bytes=case.bytes,
            flops=case.flops,
            bandwidth=self.ceilings.bandwidth,
            rate=self.ceilings.rate(shape.a_dtype, shape.b_dtype),
            device=machine.device,
            device_type=machine.device_type,
            torch=machine.torch,
            triton=machine.triton,
            version=machine.version,
            commit=machine.commit,
            date=machine.date,
        )


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
