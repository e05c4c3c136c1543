"""The torch engine: the fp64 truth, torch's own product, and Decompose-K as a batched product over K chunks, summed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from decompose_k.config import Config
from decompose_k.dtypes import COMPLEX, FLOATS, HALVES, accumulate_dtype
from decompose_k.epilogue import apply_activation
from decompose_k.problem import bucket_of

if TYPE_CHECKING:
    from collections.abc import Iterator

# Of a and b, and what else there is.
Product = Callable[..., torch.Tensor]

# fp32 copies of half operands are made panel by panel, so that a K in the millions needs no second copy of them.
# Measured on a CPU with two threads, bf16 in microseconds, panels of 1 and 4 MiB: 16 x 256 x 7168 6957 and 1783,
# 64 x 64 x 28672 27752 and 14857, 16 x 16 x 32768 1505 and 838. Larger ones gain nothing more.
PANEL_BYTES = 4 << 20
# Up to here whole widened copies and one product are faster still: 0.6 against 0.9 ms for 16 x 24 x 28672, bf16 x fp32.
WHOLE_COPY_BYTES = 16 << 20

# cuBLAS adds up a chunk in one accumulator: longer ones round worse than torch.mm, which splits K by itself. Of fp32,
# K = 515 and values that are constant along K, chunks of 128, 64 and 32 make 7.2, 2.5 and 1.05 times torch's error.
CUDA_CHUNK = 128
CUDA_CHUNK_FP32 = 32
# The same of a CPU's batched products with few rows: of fp64, [2, 5760] @ [5760, 128] and MKL with AVX-512, chunks of
# 2880, 1440 and 360 make 2.9, 2.1 and 1.04 times torch's error. With more rows the length makes no such difference.
CPU_CHUNK_FP64 = 384
FEW_ROWS = 8
# A large output fills a GPU by itself, and torch.mm then has one accumulator too; its partials would take gigabytes.
LARGE_OUTPUT = 1 << 17
# BLAS sums a single row one product after the other: a chain this short is as accurate as its product of many rows.
INVARIANT_CHUNK = 256


def truth(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    alpha: complex = 1.0,
    beta: complex = 1.0,
    activation: str | None = None,
) -> torch.Tensor:
    """The product in the widest dtype of its kind, against which every engine is measured.

    out = activation(alpha * (a @ b) + beta * bias), in fp64 for floats, complex128 for complex and int64 for integers.

    >>> truth(torch.ones(1, 3, dtype=torch.bfloat16), torch.ones(3, 1, dtype=torch.bfloat16))
    tensor([[3.]], dtype=torch.float64)
    """
    wide = _widest(a.dtype)
    alpha, beta = _scalars(alpha, beta, wide)
    product = torch.matmul(a.to(wide), b.to(wide)) * alpha
    if bias is not None and beta != 0:
        product = product + bias.to(wide) * beta
    return apply_activation(product, activation)


def composite(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    alpha: complex = 1.0,
    beta: complex = 1.0,
    activation: str | None = None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """The same product out of differentiable torch calls, for tensors and modes that only torch's own ops know."""
    wide = accumulate_dtype(a.dtype, b.dtype)
    alpha, beta = _scalars(alpha, beta, wide)
    product = torch.matmul(a.to(wide), b.to(wide))
    if alpha != 1:
        product = product * alpha
    if bias is not None and beta != 0:
        product = product + (bias.to(wide) if beta == 1 else bias.to(wide) * beta)
    return _activate(product, activation).to(out_dtype)


def torch_matmul(
    config: Config,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    alpha: complex = 1.0,
    beta: complex = 1.0,
    activation: str | None = None,
    out_dtype: torch.dtype,
    out: torch.Tensor | None = None,
    precision: str | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """out[m, n] = activation(alpha * (a[m, k] @ b[k, n]) + beta * bias[m, n]) with torch's kernels.

    `config.kernel` is `mm` (torch's own) or `bmm_sum` (K in `config.split_k` chunks). Arguments are valid already.
    """
    wide = accumulate_dtype(a.dtype, b.dtype)
    setting = _wanted_setting(a, wide, precision)
    if setting is None:
        return _compute(config, a, b, bias, (alpha, beta), activation, out_dtype, out, batch_invariant)
    with _fp32_products(*setting):
        return _compute(config, a, b, bias, (alpha, beta), activation, out_dtype, out, batch_invariant)


def torch_shortcuts(
    config: Config,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    alpha: float,
    beta: float,
    activation: str | None,
    out_dtype: torch.dtype,
    precision: str | None = None,
) -> tuple[Product, Product, Product | None, Product | None] | None:
    """What further calls like one of `torch_matmul` come down to: (a, b, bias, m) and (x, weight, bias, m).

    The other two, if there are any, are functions of torch's that do the same: (a, b), and (x, weight) with the bias if
    there is one, for an x whose strides are those of its rows. None at all where more is needed than one call of
    torch's, or where torch's setting of fp32 products is not `precision`.
    """
    if config.kernel != "mm" or a.dtype not in FLOATS or activation not in (None, "relu"):
        return None
    if a.is_cuda and a.dtype != b.dtype:
        return None
    if _wanted_setting(a, accumulate_dtype(a.dtype, b.dtype), precision) is not None:
        return None
    if not a.is_cuda and not _is_one_call_on_a_cpu(a, b, bias, out_dtype, alpha):
        return None
    direct_matmul: Product | None = None
    direct_linear: Product | None = None
    if bias is None and a.dtype == b.dtype == out_dtype and alpha == 1:
        products: tuple[Product, Product] = (lambda a, b, _bias, _m: torch.mm(a, b), _linear_with_bias)
        direct_matmul, direct_linear = torch.mm, F.linear
    elif not a.is_cuda:
        products = (
            lambda a, b, _bias, _m: torch.mm(a.float(), b.float()),
            lambda x, weight, _bias, m: torch.mm(x.reshape(m, -1).float(), weight.t().float()),
        )
    elif bias is None and a.dtype in HALVES and out_dtype == torch.float32 and alpha == 1:
        products = (
            lambda a, b, _bias, _m: torch.mm(a, b, out_dtype=torch.float32),
            lambda x, weight, _bias, m: torch.mm(x.view(m, -1), weight.t(), out_dtype=torch.float32),
        )
    elif bias is not None and bias.dtype == out_dtype == a.dtype and alpha != 0 and beta != 0:
        products = (lambda a, b, bias, _m: torch.addmm(bias, a, b, alpha=alpha, beta=beta), _linear_with_bias)
        # Torch adds another bias to a batch in a call of its own.
        direct_linear = F.linear if bias.dim() == 1 and bias.is_contiguous() else None
    else:
        return None
    for_matmul, for_linear = products
    if activation is not None:
        return _then_relu(for_matmul), _then_relu(for_linear), None, None
    return for_matmul, for_linear, direct_matmul, direct_linear


def _linear_with_bias(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, m: int) -> torch.Tensor:
    # Of more than two dimensions torch makes a batched product where a stride of a single row is odd, with other bits.
    rows = x if x.dim() == 2 else x.view(m, -1)
    return torch.mm(rows, weight.t()) if bias is None else torch.addmm(bias, rows, weight.t())


def _is_one_call_on_a_cpu(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype, alpha: float
) -> bool:
    """Whether torch's product is all, or that of fp32 copies, small ones for every M of the bucket."""
    if bias is not None or alpha != 1:
        return False
    if a.dtype == b.dtype == out_dtype:
        return True
    copies = a.shape[1] * (bucket_of(a.shape[0]) + b.shape[1]) * torch.float32.itemsize
    wide = accumulate_dtype(a.dtype, b.dtype)
    return wide == out_dtype == torch.float32 and copies <= WHOLE_COPY_BYTES


def _then_relu(product: Product) -> Product:
    return lambda a, b, bias, m: product(a, b, bias, m).relu_()


def _compute(
    config: Config,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    factors: tuple[complex, complex],
    activation: str | None,
    out_dtype: torch.dtype,
    out: torch.Tensor | None,
    batch_invariant: bool,
) -> torch.Tensor:
    if batch_invariant:
        sums = _product_by_rows(config, a, b)
    else:
        if config.kernel == "mm" and a.dtype == b.dtype == out_dtype and activation in (None, "relu"):
            own = _torch_own(a, b, bias, factors, activation, out)
            if own is not None:
                return own
        sums = _product(config, a, b)
    alpha, beta = _scalars(*factors, sums.dtype)
    if alpha != 1:
        sums.mul_(alpha)
    if bias is not None and beta != 0:
        term = bias.to(sums.dtype)
        sums.add_(term if beta == 1 else term * beta)
    sums = _activate_rows(sums, activation) if batch_invariant else _activate(sums, activation)
    return sums.to(out_dtype) if out is None else out.copy_(sums)


def _torch_own(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    factors: tuple[complex, complex],
    activation: str | None,
    out: torch.Tensor | None,
) -> torch.Tensor | None:
    """torch's kernel with its own rounding, where that is the only rounding; None where the epilogue needs the sums.

    relu may follow the rounding: it is monotone and keeps every representable value.
    """
    alpha, beta = factors
    target = out if out is not None and out.is_contiguous() else None
    if bias is None or beta == 0:
        if alpha != 1:
            return None
        result = torch.mm(a, b) if target is None else torch.mm(a, b, out=target)
    elif a.is_cuda and bias.dtype == a.dtype and a.dtype in FLOATS and alpha != 0 and a.shape[1] > 0:
        result = torch.addmm(bias, a, b, alpha=alpha, beta=beta, out=target)
    else:
        return None
    if activation == "relu":
        result.relu_()
    return result if out is None or target is not None else out.copy_(result)


def _product(config: Config, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b in the accumulate dtype: K is cut in chunks, whose partial products are summed in a fixed order."""
    m, k = a.shape
    n = b.shape[1]
    wide = accumulate_dtype(a.dtype, b.dtype)
    if 0 in (m, n, k):
        return torch.zeros((m, n), dtype=wide, device=a.device)
    is_small = not a.is_cuda and k * (m + n) * wide.itemsize <= WHOLE_COPY_BYTES
    in_halves = a.is_cuda and a.dtype == b.dtype and a.dtype in HALVES
    if config.kernel == "mm" and in_halves:
        return torch.mm(a, b, out_dtype=wide)
    if config.kernel == "mm" and (a.dtype == b.dtype == wide or a.is_cuda or is_small):
        return torch.mm(a.to(wide), b.to(wide))
    chunk = -(-k // (config.split_k if config.kernel == "bmm_sum" else 1))
    if a.is_cuda and m * n < LARGE_OUTPUT:
        chunk = min(chunk, CUDA_CHUNK_FP32 if wide == torch.float32 and not in_halves else CUDA_CHUNK)
    elif not a.is_cuda and m * n < LARGE_OUTPUT and min(m, n) <= FEW_ROWS and a.dtype == b.dtype == torch.float64:
        chunk = min(chunk, CPU_CHUNK_FP64)
    whole = k // chunk
    body = whole * chunk
    count = whole + (body < k)
    buffer = torch.empty((count, m, n) if count > 1 else (m, n), dtype=wide, device=a.device)
    partials = buffer if count > 1 else buffer[None]
    a_chunks = torch.unflatten(a[:, :body], 1, (whole, chunk)).transpose(0, 1)
    _multiply_chunks(a_chunks, torch.unflatten(b[:body], 0, (whole, chunk)), partials[:whole])
    if body < k:
        _multiply_chunks(a[None, :, body:], b[None, body:], partials[whole:])
    if count == 1:
        return buffer
    exact = torch.float64 if a.is_cuda and wide == torch.float32 else wide
    return buffer.sum(0, dtype=exact).to(wide)


def _multiply_chunks(a: torch.Tensor, b: torch.Tensor, partials: torch.Tensor) -> None:
    """partials[s] = a[s] @ b[s] for a [S, M, chunk] and b [S, chunk, N], widened no more than a panel at a time."""
    wide = partials.dtype
    if a.dtype == b.dtype == wide:
        torch.bmm(a, b, out=partials)
    elif a.device.type == "cuda" and a.dtype == b.dtype and a.dtype in HALVES:
        torch.bmm(a, b, out_dtype=wide, out=partials)
    else:
        _multiply_widened(a, b, partials)


def _multiply_widened(a: torch.Tensor, b: torch.Tensor, partials: torch.Tensor) -> None:
    wide = partials.dtype
    splits, m, chunk = a.shape
    depth = max(1, PANEL_BYTES // (wide.itemsize * (m + b.shape[2])))
    group = max(1, depth // chunk)
    for split in range(0, splits, group):
        target = partials[split : split + group]
        for first in range(0, chunk, depth):
            x = a[split : split + group, :, first : first + depth].to(wide)
            y = b[split : split + group, first : first + depth].to(wide)
            if first == 0:
                torch.bmm(x, y, out=target)
            else:
                target.baddbmm_(x, y)


def _product_by_rows(config: Config, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b, every row by the same calls on memory of the same alignment, so that BLAS can see neither M nor m.

    In a block of rows some BLAS kernels sum the last rows, or the unaligned ones, in another order than the others.
    """
    m, k = a.shape
    n = b.shape[1]
    wide = accumulate_dtype(a.dtype, b.dtype)
    sums = torch.zeros((m, n), dtype=wide, device=a.device)
    if 0 in (m, n, k):
        return sums
    chunk = min(-(-k // config.split_k), INVARIANT_CHUNK)
    panel_depth = max(1, PANEL_BYTES // (wide.itemsize * (n + 1) * chunk)) * chunk
    in_halves = a.is_cuda and a.dtype == b.dtype and a.dtype in HALVES
    operand_dtype = a.dtype if in_halves else wide
    for first in range(0, k, panel_depth):
        panel = b[first : first + panel_depth].to(operand_dtype)
        chunks = Config("bmm_sum", split_k=-(-panel.shape[0] // chunk))
        for m_index in range(m):
            row = a[m_index, first : first + panel_depth].to(operand_dtype, copy=True).contiguous()
            sums[m_index] += _product(chunks, row[None], panel)[0]
    return sums


def _activate(sums: torch.Tensor, activation: str | None) -> torch.Tensor:
    activated = apply_activation(sums, activation)
    if activation == "gelu" and sums.is_cpu:
        # Of fp32 and bf16 it is oneDNN's, which on some processors (AMD's with AVX-512) makes NaN of infinity.
        return torch.where(sums == torch.inf, torch.inf, activated)
    return activated


def _activate_rows(sums: torch.Tensor, activation: str | None) -> torch.Tensor:
    # On a CPU the vector and the scalar form of exp, erf and tanh differ in the last bit, and which of them serves an
    # element depends on its place in the whole buffer: one call per row makes that place a function of n alone.
    if activation is None or activation == "relu" or sums.device.type != "cpu":
        return _activate(sums, activation)
    for row in sums:
        row.copy_(_activate(row.clone(), activation))
    return sums


def _wanted_setting(a: torch.Tensor, wide: torch.dtype, precision: str | None) -> tuple[Any, str] | None:
    """torch's fp32 product setting and the value that `precision` allows; None where it agrees or has no say."""
    if wide != torch.float32 or (a.is_cuda and precision is None):
        return None
    backends: Any = torch.backends
    backend = backends.cuda.matmul if a.is_cuda else backends.mkldnn.matmul
    wanted = "tf32" if precision == "tf32" and a.is_cuda else "ieee"
    found = backend.fp32_precision
    return None if found == wanted or (wanted == "ieee" and found == "none") else (backend, wanted)


@contextlib.contextmanager
def _fp32_products(backend: Any, wanted: str) -> Iterator[None]:
    found = backend.fp32_precision
    backend.fp32_precision = wanted
    try:
        yield
    finally:
        backend.fp32_precision = found


def _scalars(alpha: complex, beta: complex, dtype: torch.dtype) -> tuple[complex, complex]:
    """alpha and beta as whole numbers where the sums are integers, which a float scalar would promote."""
    if dtype.is_floating_point or dtype.is_complex:
        return alpha, beta
    return int(alpha.real), int(beta.real)


def _widest(dtype: torch.dtype) -> torch.dtype:
    if dtype in COMPLEX:
        return torch.complex128
    return torch.float64 if dtype in FLOATS else torch.int64
