"""What is to be computed: the frozen description from which every choice is made."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from decompose_k.dtypes import (
    FLOATS,
    HALVES,
    SUPPORTED,
    accumulate_dtype,
    allowed_out_dtypes,
    can_multiply,
    default_out_dtype,
    dtype_from_name,
    dtype_name,
    multiplies_on,
)
from decompose_k.epilogue import ACTIVATIONS

LAYOUTS = ("row", "column", "strided")
# The m that stands for all in choosing for a batch-invariant problem, whose choice may not depend on m.
INVARIANT_BUCKET = 64
PRECISIONS = ("ieee", "tf32x3", "tf32")
HIGHEST = "highest"


def layout_of(matrix: torch.Tensor) -> str:
    """`row` if the last dimension is contiguous, `column` if the first one is, else `strided`."""
    rows, columns = matrix.shape
    if columns <= 1 or matrix.stride(1) == 1:
        return "row"
    if rows <= 1 or matrix.stride(0) == 1:
        return "column"
    return "strided"


@dataclass(frozen=True, slots=True)
class Problem:
    """One matrix product, out[m, n] = activation(a[m, k] @ b[k, n] + bias), described without its data.

    `precision` is how fp32 operands may be multiplied: `ieee`, `tf32x3`, `tf32`, or `highest` (as good as torch's fp32,
    the kernel chooses); None where no operand is fp32. `bias` is the bias dtype, or None for no bias.
    """

    m: int
    n: int
    k: int
    a_dtype: torch.dtype
    b_dtype: torch.dtype
    out_dtype: torch.dtype
    bias_dtype: torch.dtype | None = None
    a_layout: str = "row"
    b_layout: str = "row"
    activation: str | None = None
    precision: str | None = None
    batch_invariant: bool = False
    static_b: bool = False
    device_type: str = "cuda"

    def __post_init__(self) -> None:
        for name in ("m", "n", "k"):
            size = getattr(self, name)
            if not isinstance(size, int) or isinstance(size, bool) or size < 0:
                raise ValueError(f"{name} must be an integer >= 0; got {size!r}")
        for name in ("a_dtype", "b_dtype", "out_dtype"):
            if getattr(self, name) not in SUPPORTED:
                raise TypeError(f"{name} must be one of {_supported_names()}; got {getattr(self, name)}")
        if self.bias_dtype is not None and self.bias_dtype not in SUPPORTED:
            raise TypeError(f"bias_dtype must be None or one of {_supported_names()}; got {self.bias_dtype}")
        _check_kinds(self)
        for name in ("a_layout", "b_layout"):
            if getattr(self, name) not in LAYOUTS:
                raise ValueError(f"{name} must be one of {', '.join(LAYOUTS)}; got {getattr(self, name)!r}")
        if self.activation is not None and self.activation not in ACTIVATIONS:
            raise ValueError(f"activation must be None or one of {', '.join(ACTIVATIONS)}; got {self.activation!r}")
        allowed = (HIGHEST, *PRECISIONS) if self.has_fp32_product else (None,)
        if self.precision not in allowed:
            raise ValueError(
                f"precision must be one of {allowed} for operands {dtype_name(self.a_dtype)} x"
                f" {dtype_name(self.b_dtype)}; got {self.precision!r}"
            )

    @classmethod
    def make(
        cls,
        m: int,
        n: int,
        k: int,
        dtype: torch.dtype = torch.bfloat16,
        *,
        b_dtype: torch.dtype | None = None,
        out_dtype: torch.dtype | None = None,
        **rest: Any,
    ) -> Problem:
        """A problem with torch's defaults filled in: b like a, promoted output, `highest` where an operand is fp32."""
        b_dtype = dtype if b_dtype is None else b_dtype
        out_dtype = default_out_dtype(dtype, b_dtype) if out_dtype is None else out_dtype
        if rest.get("precision") is None and accumulates_fp32_operand(dtype, b_dtype):
            rest["precision"] = HIGHEST
        return cls(m, n, k, dtype, b_dtype, out_dtype, **rest)

    @property
    def has_fp32_product(self) -> bool:
        """Whether an operand is fp32 and the product is summed in fp32, so that `precision` has a meaning."""
        return accumulates_fp32_operand(self.a_dtype, self.b_dtype)

    @property
    def accumulate_dtype(self) -> torch.dtype:
        """Dtype of the partial sums and of the epilogue."""
        return accumulate_dtype(self.a_dtype, self.b_dtype)

    @property
    def is_one_half(self) -> bool:
        """Whether tensor cores multiply the operands as they are: two kinds of halves have none in common."""
        return self.a_dtype in HALVES and self.a_dtype == self.b_dtype

    @property
    def is_float(self) -> bool:
        """Whether every dtype is a real floating one, which is what the Triton kernels take."""
        dtypes = (self.a_dtype, self.b_dtype, self.out_dtype, self.bias_dtype or torch.float32)
        return all(dtype in FLOATS for dtype in dtypes)

    @property
    def flops(self) -> int:
        """Floating-point operations of the product: 2 m n k."""
        return 2 * self.m * self.n * self.k

    @property
    def bytes(self) -> int:
        """Least bytes to move: each operand read once, the output written once."""
        return (
            self.m * self.k * self.a_dtype.itemsize
            + self.k * self.n * self.b_dtype.itemsize
            + self.m * self.n * self.out_dtype.itemsize
        )

    def bucketed(self) -> Problem:
        """The problem that choices are made for: m rounded up to a power of two; the same for all m if batch-invariant.

        >>> [Problem.make(m, 256, 7168).bucketed().m for m in (0, 1, 2, 3, 33, 64)]
        [0, 1, 2, 4, 64, 64]
        """
        m = INVARIANT_BUCKET if self.batch_invariant and self.m else bucket_of(self.m)
        return self if m == self.m else replace(self, m=m)

    def roofline_seconds(self, bandwidth: float, rate: float) -> float:
        """Least time on a machine of `bandwidth` bytes/s and `rate` flop/s: the longer of moving and computing."""
        if bandwidth <= 0 or rate <= 0:
            raise ValueError(f"bandwidth and rate must be > 0; got {bandwidth} and {rate}")
        return max(self.bytes / bandwidth, self.flops / rate)

    def to_json(self) -> dict[str, Any]:
        """Plain values for a JSON file; `from_json` restores an equal problem."""
        return {
            name: dtype_name(value) if isinstance(value, torch.dtype) else value for name, value in asdict(self).items()
        }

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Problem:
        """The problem that `to_json` described; raises ValueError or TypeError for anything else."""
        fields = dict(fields)
        for name in ("a_dtype", "b_dtype", "out_dtype", "bias_dtype"):
            if fields.get(name) is not None:
                fields[name] = dtype_from_name(fields[name])
        return cls(**fields)


def _check_kinds(problem: Problem) -> None:
    """Raise TypeError for dtypes that do not go together, as `matmul` does for such operands."""
    a, b = problem.a_dtype, problem.b_dtype
    if not can_multiply(a, b):
        raise TypeError(f"b_dtype must be {dtype_name(a)}, as a_dtype is, unless both are real floating; got {b}")
    if not multiplies_on(a, problem.device_type):
        raise TypeError(f"a_dtype must be floating or complex on a GPU, as for torch.mm; got {dtype_name(a)}")
    for name in ("out_dtype", "bias_dtype"):
        dtype = getattr(problem, name)
        if dtype is not None and dtype not in allowed_out_dtypes(a):
            allowed = ", ".join(map(dtype_name, allowed_out_dtypes(a)))
            raise TypeError(f"{name} must be one of {allowed} for {dtype_name(a)} operands; got {dtype_name(dtype)}")
    if problem.activation is not None and a not in FLOATS:
        raise TypeError(f"activation must be None for {dtype_name(a)} operands; got {problem.activation!r}")


def bucket_of(m: int) -> int:
    """m rounded up to a power of two; 0 stays 0."""
    return 1 << (m - 1).bit_length() if m else 0


def accumulates_fp32_operand(a: torch.dtype, b: torch.dtype) -> bool:
    """True where an operand is fp32 and the sums are fp32."""
    return torch.float32 in (a, b) and accumulate_dtype(a, b) == torch.float32


def _supported_names() -> str:
    return ", ".join(dtype_name(dtype) for dtype in SUPPORTED)
