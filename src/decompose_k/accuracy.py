"""Random operands of a problem, torch's product of them and ours, and how far each is from an fp64 truth."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from decompose_k import reference
from decompose_k.arguments import Options
from decompose_k.config import Config
from decompose_k.dtypes import FLOATS, HALVES, dtype_name
from decompose_k.epilogue import apply_activation
from decompose_k.execute import Shortcut, Shortcuts, execute
from decompose_k.problem import Problem
from decompose_k.reference import Product

Operands = tuple[torch.Tensor, ...]

# The truth is summed over K in pieces, so that no fp64 copy of a large operand is made.
_TRUTH_CHUNK = 1 << 18
# Of a product with few outputs several draws are judged together: the error of a single one is mostly luck.
_JUDGED_OUTPUTS = 512
_MOST_DRAWS = 8
# An error estimated from 512 outputs is good to 3 %: an equal one can look a tenth larger, and no more.
_EQUAL = 1.1
_MOST_SAID = 160


def make_operands(problem: Problem, device: torch.device, generator: torch.Generator) -> Operands:
    """Random operands of a problem in its dtypes and layouts: a [m, k], b [k, n], and a bias [n] where it has one."""
    a = random_matrix(problem.m, problem.k, problem.a_dtype, problem.a_layout, device, generator)
    b = random_matrix(problem.k, problem.n, problem.b_dtype, problem.b_layout, device, generator)
    if problem.bias_dtype is None:
        return a, b
    return a, b, random_matrix(1, problem.n, problem.bias_dtype, "row", device, generator)[0]


def random_matrix(
    rows: int, columns: int, dtype: torch.dtype, layout: str, device: torch.device, generator: torch.Generator
) -> torch.Tensor:
    """A standard normal matrix whose contiguous dimension is the one that `layout` names; `strided` has none."""
    if layout == "strided":
        return random_matrix(2 * rows, 2 * columns, dtype, "row", device, generator)[::2, ::2]
    size = (columns, rows) if layout == "column" else (rows, columns)
    sampled = dtype if dtype in FLOATS and device.type == "cuda" else torch.float32
    matrix = torch.randn(size, dtype=sampled, device=device, generator=generator).to(dtype)
    return matrix.T if layout == "column" else matrix


def truth(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, *, activation: str | None = None
) -> torch.Tensor:
    """activation(a @ b + bias) in fp64."""
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64, device=a.device)
    for start in range(0, a.shape[1], _TRUTH_CHUNK):
        piece = slice(start, start + _TRUTH_CHUNK)
        total += reference.truth(a[:, piece], b[piece])
    if bias is not None:
        total += bias.double()
    return apply_activation(total, activation)


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of the expectation (over 1 where that is zero)."""
    norm = torch.linalg.vector_norm(expected).item()
    return float(torch.linalg.vector_norm(result.double() - expected).item() / (norm or 1.0))


def allowed_error(torch_error: float, out_dtype: torch.dtype, k: int, factor: float = 2.0) -> float:
    """`factor` times torch's own error, but at least what one rounding of the result costs.

    An fp64 result is compared with a sum in fp64, so that two orders of summing k terms may differ by more than that.
    """
    rounding = torch.finfo(out_dtype).eps / 2
    return max(factor * torch_error, rounding * math.sqrt(max(k, 1)) if out_dtype == torch.float64 else rounding)


def torch_product(problem: Problem) -> tuple[str, Product]:
    """Torch's product as one would write it by hand in these dtypes, with its label: call(a, b) or call(a, b, bias)."""
    common = torch.promote_types(problem.a_dtype, problem.b_dtype)
    product: Product
    if problem.a_dtype != problem.b_dtype:
        label, product = f"torch.mm of {dtype_name(common)} copies", mm_of_copies(common, problem.out_dtype)
    elif problem.out_dtype == common:
        if problem.bias_dtype == common:
            return _activated("torch.addmm", lambda a, b, bias: torch.addmm(bias, a, b), problem.activation)
        label, product = "torch.mm", torch.mm
    elif problem.device_type == "cuda" and common in HALVES and problem.out_dtype == torch.float32:
        label, product = "torch.mm(out_dtype=fp32)", _mm_to_fp32
    elif common in HALVES and problem.out_dtype == torch.float32:
        # torch.mm has no such output on a CPU, and one rounded to halves first would not be the result asked for.
        label, product = "torch.mm of fp32 copies", mm_of_copies(torch.float32, torch.float32)
    else:
        label, product = f"torch.mm, then to {dtype_name(problem.out_dtype)}", mm_of_copies(common, problem.out_dtype)
    if problem.bias_dtype is not None:
        label, product = f"{label} + bias", _with_bias(product, problem.out_dtype)
    return _activated(label, product, problem.activation)


def mm_of_copies(dtype: torch.dtype, out_dtype: torch.dtype) -> Product:
    """torch.mm of operands converted first, its result converted last."""
    return lambda a, b: torch.mm(a.to(dtype), b.to(dtype)).to(out_dtype)


def then_activation(product: Product, activation: str | None) -> Product:
    """A product, and an activation in a call of its own."""
    if activation is None:
        return product
    return lambda *operands: apply_activation(product(*operands), activation)


def own_product(problem: Problem, config: Config | None = None) -> Product:
    """Our product of a problem's operands, call(a, b) or call(a, b, bias), with a config or with what is planned.

    Every call must be given operands as `make_operands` makes them, on the current device.
    """
    options = Options(
        activation=problem.activation,
        out_dtype=problem.out_dtype,
        precision=problem.precision,
        batch_invariant=problem.batch_invariant,
        static_b=problem.static_b,
        config=config,
    )

    # The shortcut that the first call leaves makes capturing hundreds of calls five times as fast.
    kept: list[Shortcut] = []

    def keep(shortcuts: Shortcuts) -> None:
        kept[:] = [shortcuts.for_matmul]

    def call(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        result = kept[0](a, b, bias, problem.m) if kept else None
        return execute(a, b, bias, options, keep=keep) if result is None else result

    return call


@dataclass(frozen=True, slots=True)
class Judge:
    """What is right for a problem: an error against fp64 within what torch's own, on the same operands, allows.

    Of fp32 operands at full precision no more than torch's own error is allowed (as far as draws can tell), else twice
    as much.
    """

    operands: tuple[Operands, ...]
    expected: torch.Tensor
    allowed: float

    @classmethod
    def of(cls, problem: Problem, input_sets: Sequence[Operands]) -> Judge:
        """The judge of a problem by its first few sets of operands."""
        draws = min(len(input_sets), _MOST_DRAWS, -(-_JUDGED_OUTPUTS // max(1, problem.m * problem.n)))
        operands = tuple(input_sets[:draws])
        expected = torch.stack([truth(*one, activation=problem.activation) for one in operands])
        is_fp32 = problem.a_dtype == problem.b_dtype == torch.float32 and problem.precision != "tf32"
        undecided = cls(operands, expected, 0.0)
        torch_error = undecided.error(torch_product(problem)[1])
        return cls(
            operands, expected, allowed_error(torch_error, problem.out_dtype, problem.k, _EQUAL if is_fp32 else 2.0)
        )

    def error(self, call: Product) -> float:
        """Relative error of a product over all its draws."""
        return relative_error(torch.stack([call(*one) for one in self.operands]), self.expected)

    def objection(self, call: Product) -> str | None:
        """Why a product is not to be used: it is too far from the truth, or it failed; None where it is right."""
        try:
            error = self.error(call)
        except Exception as failure:  # noqa: BLE001 - a candidate may fail in any way, and only itself is lost by it
            return brief(failure)
        return None if error <= self.allowed else f"error {error:.1e}, allowed {self.allowed:.1e}"


def brief(error: BaseException) -> str:
    """An error in one line: its kind and the beginning of what it says."""
    first = (str(error).strip().splitlines() or ["no message"])[0]
    return f"{type(error).__name__}: {textwrap.shorten(first, _MOST_SAID)}"


def _activated(label: str, product: Product, activation: str | None) -> tuple[str, Product]:
    return (label if activation is None else f"{activation}({label})"), then_activation(product, activation)


def _with_bias(product: Product, out_dtype: torch.dtype) -> Product:
    return lambda a, b, bias: product(a, b) + bias.to(out_dtype)


def _mm_to_fp32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.mm(a, b, out_dtype=torch.float32)
