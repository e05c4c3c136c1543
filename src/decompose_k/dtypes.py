"""Dtype rules: what is accepted, what sums are kept in, and the names used in files and on the command line."""

from __future__ import annotations

import torch

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
HALVES = (torch.float16, torch.bfloat16)
COMPLEX = (torch.complex64, torch.complex128)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
SUPPORTED = FLOATS + COMPLEX + INTEGERS

_NAMES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.complex64: "complex64",
    torch.complex128: "complex128",
    torch.uint8: "uint8",
    torch.int8: "int8",
    torch.int16: "int16",
    torch.int32: "int32",
    torch.int64: "int64",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Short name of a supported dtype, as used in rows, cache keys and on the command line."""
    return _NAMES[dtype]


def dtype_from_name(name: str) -> torch.dtype:
    """Inverse of `dtype_name`; raises ValueError that lists what is allowed."""
    try:
        return _DTYPES[name]
    except KeyError:
        raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}; got {name!r}") from None


def accumulate_dtype(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    """Dtype of the partial sums: fp32 for halves, otherwise the operands' own, as torch.mm keeps integers."""
    common = torch.promote_types(a, b)
    return torch.float32 if common in HALVES else common


def can_multiply(a: torch.dtype, b: torch.dtype) -> bool:
    """Whether operands of these dtypes go together: real floats mix freely, integers and complex only with themselves.

    >>> can_multiply(torch.bfloat16, torch.float32), can_multiply(torch.bfloat16, torch.int8)
    (True, False)
    """
    return a is b or (a in FLOATS and b in FLOATS)


def allowed_out_dtypes(a: torch.dtype) -> tuple[torch.dtype, ...]:
    """What a result, or a bias, may be for operands of a dtype: any real float for floats, else the dtype itself."""
    return FLOATS if a in FLOATS else (a,)


def multiplies_on(dtype: torch.dtype, device_type: str) -> bool:
    """Whether torch multiplies matrices of this dtype there: a GPU has no integer products."""
    return device_type != "cuda" or dtype not in INTEGERS


def default_out_dtype(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    """Dtype of the result when none is asked for: torch's own promotion of the operands."""
    return torch.promote_types(a, b)
