"""What `verify` checks: each promise as a function that says what it saw, or raises what is wrong."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from decompose_k.api import linear, matmul
from decompose_k.dtypes import FLOATS, HALVES, accumulate_dtype, dtype_name
from decompose_k.epilogue import ACTIVATIONS, apply_activation
from decompose_k.reference import composite, truth

if TYPE_CHECKING:
    from collections.abc import Callable

# M, N, K of the study's grid and of routers, LoRA, mHC and Gram products.
SHAPES = (
    (16, 16, 8192),
    (32, 32, 16384),
    (64, 64, 32768),
    (1, 256, 7168),
    (16, 128, 2880),
    (2, 160, 5120),
    (64, 16, 4096),
    (64, 24, 28672),
    (24, 24, 65536),
)
QUICK_SHAPES = ((16, 16, 8192), (1, 256, 7168), (16, 128, 2880))
AWKWARD_SHAPES = ((1, 1, 1), (1, 1, 1031), (7, 13, 1009), (17, 1, 257), (3, 24, 4097), (33, 65, 129))
EMPTY_SHAPES = ((0, 3, 5), (3, 0, 5), (3, 4, 0), (0, 0, 0))


class BrokenError(AssertionError):
    """A promise that is not kept."""


class Case(NamedTuple):
    """Where and with what a check runs."""

    device: torch.device
    backend: str
    quick: bool

    @property
    def shapes(self) -> tuple[tuple[int, int, int], ...]:
        """The real shapes to go through."""
        return QUICK_SHAPES if self.quick else SHAPES

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes to go through."""
        return (torch.bfloat16, torch.float32) if self.quick else FLOATS

    def random(self, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
        """Standard normal values, the same on every machine."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(self.device)

    def operands(self, m: int, n: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Random a [M, K] and b [K, N]."""
        return self.random(m, k, dtype=dtype), self.random(k, n, dtype=dtype, seed=1)

    def matmul(self, a: torch.Tensor, b: torch.Tensor, **options: Any) -> torch.Tensor:
        """`matmul` with the case's backend."""
        return matmul(a, b, backend=self.backend, **options)


def check_accuracy(case: Case) -> str:
    """Error against fp64 on real shapes."""
    return _largest(case, case.shapes)


def check_awkward_sizes(case: Case) -> str:
    """One, primes and a K that no chunk divides."""
    return _largest(case, AWKWARD_SHAPES)


def _largest(case: Case, shapes: tuple[tuple[int, int, int], ...]) -> str:
    worst = 0.0
    for dtype in case.dtypes:
        for shape in shapes:
            a, b = case.operands(*shape, dtype)
            worst = max(worst, _judge(case.matmul(a, b), a, b, f"{dtype_name(dtype)} {shape}"))
            if dtype in HALVES:
                wide = case.matmul(a, b, out_dtype=torch.float32)
                worst = max(worst, _judge(wide, a, b, f"{dtype_name(dtype)} {shape} to fp32"))
    return f"{len(case.dtypes) * len(shapes)} products; largest error {worst:.2f} of what is allowed"


def check_empty(case: Case) -> str:
    """0 in each dimension."""
    bias = case.random(4)
    for m, n, k in EMPTY_SHAPES:
        result = case.matmul(*case.operands(m, n, k, torch.float32))
        _require(result.shape == (m, n) and not result.any(), f"M, N, K = {m}, {n}, {k} gave {result}")
    result = case.matmul(*case.operands(3, 4, 0, torch.float32), bias=bias, beta=2.0, activation="relu")
    _require(torch.equal(result, torch.relu(2.0 * bias).expand(3, 4)), "K = 0 did not give the activated bias")
    return f"{len(EMPTY_SHAPES)} shapes, and K = 0 with a bias"


def check_strides(case: Case) -> str:
    """Transposed, sliced, padded and expanded operands."""
    a, b = case.operands(12, 20, 1030, torch.float32)
    layouts = {
        "transposed": (a.t().contiguous().t(), b.t().contiguous().t()),
        "sliced": (a[::2, ::3], b[::3, ::2]),
        "padded": (a[:, 1:-1], b[1:-1]),
        "expanded": (a[:, :1].expand(12, 1030), b),
        "expanded rows": (a[:1].expand(12, 1030), b[:1].expand(1030, 20)),
    }
    for name, (x, y) in layouts.items():
        _judge(case.matmul(x, y), x, y, name)
    return ", ".join(layouts)


def check_special_values(case: Case) -> str:
    """NaN, infinities and -0.0 as in torch."""
    for dtype in case.dtypes:
        a, b = case.operands(6, 7, 129, dtype)
        a[0, 3], a[1, 5], a[2, 100], a[3, 7], a[3, 90] = (float(v) for v in ("nan", "inf", "-inf", "inf", "-inf"))
        a[4] = -0.0
        b[5, 2] = 0.0
        own = torch.mm(a, b)
        for split_k in (None, 5):
            result = case.matmul(a, b, split_k=split_k)
            special = ~torch.isfinite(own)
            same = torch.equal(torch.nan_to_num(result[special]), torch.nan_to_num(own[special]))
            _require(same and torch.equal(result.isnan(), own.isnan()), f"{dtype_name(dtype)} differs from torch.mm")
            _require(not result[4].any(), f"{dtype_name(dtype)}: a row of -0.0 gave {result[4]}")
    kept = case.matmul(case.random(1, 1).fill_(float("nan")), case.random(1, 1), activation="relu")
    _require(bool(kept.isnan().all()), "relu lost a NaN")
    return "placed in the operands, split and whole, and through relu"


def check_epilogue(case: Case) -> str:
    """Bias, alpha, beta and every activation."""
    for dtype in case.dtypes:
        a, b = case.operands(9, 12, 515, dtype)
        for shape in ((12,), (9, 12), (9, 1), ()):
            bias = case.random(*shape, dtype=dtype, seed=2)
            for activation in (None, *ACTIVATIONS):
                epilogue: dict[str, Any] = {"bias": bias, "alpha": 0.0625, "beta": -2.0, "activation": activation}
                _judge(case.matmul(a, b, **epilogue), a, b, f"{dtype_name(dtype)} {activation}", **epilogue)
    ignored = case.matmul(a, b, bias=torch.full_like(bias, float("nan")), beta=0.0)
    _require(torch.equal(ignored, case.matmul(a, b)), "a bias of NaN came through beta = 0")
    return f"{len(ACTIVATIONS)} activations, 4 shapes of bias"


def check_linear(case: Case) -> str:
    """Leading dimensions and a vector."""
    weight, bias = case.random(24, 2880), case.random(24, seed=1)
    for shape in ((2, 3, 2880), (2880,), (0, 2880)):
        x = case.random(*shape, seed=2)
        rows = x.reshape(-1, 2880)
        result = linear(x, weight, bias, activation="silu", backend=case.backend)
        _require(result.shape == (*shape[:-1], 24), f"x of shape {shape} gave {tuple(result.shape)}")
        _judge(result.reshape(-1, 24), rows, weight.t(), f"x {shape}", bias=bias, activation="silu")
    return "[2, 3, K], [K] and [0, K]"


def check_out(case: Case) -> str:
    """`out` in any strides has the bits of the result."""
    a, b = case.operands(6, 10, 4099, torch.bfloat16)
    expected = case.matmul(a, b, activation="gelu")
    buffer = torch.full((6, 30), float("nan"), dtype=torch.bfloat16, device=case.device)
    poisoned = torch.full_like(expected, float("nan"))
    for out in (poisoned, poisoned.t().contiguous().t(), buffer[:, ::3]):
        case.matmul(a, b, activation="gelu", out=out)
        _require(torch.equal(out, expected), f"strides {out.stride()} differ")
    _require(int(buffer.isfinite().sum()) == 60, "elements beside out were written")
    return "contiguous, transposed and interleaved"


def check_determinism(case: Case) -> str:
    """The same bits on every run."""
    reruns = 5 if case.quick else 50
    for dtype in case.dtypes:
        a, b = case.operands(16, 16, 8193, dtype)
        first = case.matmul(a, b, activation="silu")
        for _ in range(reruns):
            _require(torch.equal(case.matmul(a, b, activation="silu"), first), f"{dtype_name(dtype)}: a rerun differs")
    return f"{reruns} reruns of {len(case.dtypes)} dtypes"


def check_batch_invariance(case: Case) -> str:
    """A row's bits depend neither on M nor on the other rows."""
    sizes = (1, 2, 16, 17, 40)
    for dtype in case.dtypes:
        a, b = case.operands(40, 24, 2881, dtype)
        whole = case.matmul(a, b, activation="gelu", batch_invariant=True)
        for m in sizes:
            few = case.matmul(a[-m:], b, activation="gelu", batch_invariant=True)
            _require(torch.equal(few, whole[-m:]), f"{dtype_name(dtype)}: M = {m} differs from M = 40")
    return f"M = {', '.join(map(str, sizes))}"


def check_gradients(case: Case) -> str:
    """First and second derivatives as torch's own."""
    for activation in (None, *ACTIVATIONS):
        values = [case.random(3, 9, dtype=torch.float64), case.random(9, 4, dtype=torch.float64, seed=1)]
        values.append(case.random(4, dtype=torch.float64, seed=2))
        ours = _derivatives(functools.partial(_by_us, case, activation), values)
        for mine, own in zip(ours, _derivatives(functools.partial(_by_torch, activation), values), strict=True):
            is_same = torch.allclose(mine, own, rtol=1e-9, atol=1e-9)
            _require(is_same, f"{activation}: a derivative differs from torch's")
    return "of a, b and bias through every activation"


def _by_us(case: Case, activation: str | None, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return case.matmul(a, b, bias=bias, activation=activation)


def _by_torch(activation: str | None, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return apply_activation(a @ b + bias, activation)


def _derivatives(call: Callable[..., torch.Tensor], values: list[torch.Tensor]) -> list[torch.Tensor]:
    leaves = [value.clone().requires_grad_() for value in values]
    first = torch.autograd.grad(call(*leaves).square().sum(), leaves, create_graph=True)
    second = torch.autograd.grad(torch.stack([grad.square().sum() for grad in first]).sum(), leaves)
    return [*first, *second]


def check_bad_arguments(case: Case) -> str:
    """Wrong arguments raise and name themselves."""
    a, b = case.operands(3, 4, 8, torch.float32)
    wrong: dict[str, dict[str, Any]] = {
        "b": {"b": b[:7]},
        "bias": {"bias": case.random(3)},
        "activation": {"activation": "swish"},
        "out": {"out": case.random(4).expand(3, 4)},
        "out_dtype": {"out_dtype": torch.int32},
        "precision": {"precision": "fp8"},
        "split_k": {"split_k": 9},
        "backend": {"backend": "cuda"},
        "config": {"config": "mm"},
    }
    for name, options in wrong.items():
        _require_refusal(name, a, options.pop("b", b), options)
    return ", ".join(wrong)


def _require_refusal(name: str, a: torch.Tensor, b: torch.Tensor, options: dict[str, Any]) -> None:
    try:
        matmul(a, b, **options)
    except (TypeError, ValueError) as error:
        _require(str(error).startswith(f"{name} must "), f"{name}: the message is {error}")
    else:
        raise BrokenError(f"a wrong {name} was taken")


def check_operator(case: Case) -> str:
    """The operator that torch.compile and export see has the bits of the direct call."""
    a, b = case.operands(16, 24, 4099, torch.bfloat16)
    options = (None, 1.0, 1.0, "gelu", None, None, False, False, None, case.backend)
    result = torch.ops.decompose_k.matmul(a, b, *options)
    _require(torch.equal(result, case.matmul(a, b, activation="gelu")), "the operator differs from the direct call")
    batched = torch.func.vmap(lambda x: case.matmul(x, b))(torch.stack([a, a]))
    _judge(batched[1], a, b, "vmap")
    return "the same bits, and vmap"


def check_precision(case: Case) -> str:
    """fp32 at `ieee` and `tf32x3` is as accurate as torch's fp32, and the global setting survives."""
    before = torch.backends.cuda.matmul.fp32_precision
    a, b = case.operands(16, 32, 8192, torch.float32)
    for precision in ("ieee", "tf32x3"):
        # torch's own error is taken on the CPU, where no setting allows TF32.
        _judge(case.matmul(a, b, precision=precision).cpu(), a.cpu(), b.cpu(), precision)
    case.matmul(a, b, precision="tf32")
    _require(torch.backends.cuda.matmul.fp32_precision == before, "torch's own setting was changed")
    return "ieee, tf32x3 and tf32"


def check_graph_and_streams(case: Case) -> str:
    """Graph replay and four streams at once have the eager bits."""
    a, b = case.operands(16, 24, 8193, torch.bfloat16)
    eager = case.matmul(a, b, activation="relu")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = case.matmul(a, b, activation="relu")
    for _ in range(3):
        captured.fill_(float("nan"))
        graph.replay()
        _require(torch.equal(captured, eager), "a graph replay differs")
    cuda: Any = torch.cuda
    streams = [cuda.Stream(case.device) for _ in range(4)]
    results = []
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream(case.device))
    for _ in range(10):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(case.matmul(a, b, activation="relu"))
    torch.cuda.synchronize(case.device)
    _require(all(torch.equal(result, eager) for result in results), "a concurrent stream differs")
    return "3 replays, 4 streams"


CHECKS: dict[str, Callable[[Case], str]] = {
    "accuracy on real shapes": check_accuracy,
    "awkward sizes": check_awkward_sizes,
    "empty sizes": check_empty,
    "strides": check_strides,
    "special values": check_special_values,
    "epilogue": check_epilogue,
    "linear": check_linear,
    "out": check_out,
    "determinism": check_determinism,
    "batch invariance": check_batch_invariance,
    "gradients": check_gradients,
    "bad arguments": check_bad_arguments,
    "operator": check_operator,
    "precision": check_precision,
}
GPU_CHECKS: dict[str, Callable[[Case], str]] = {"graphs and streams": check_graph_and_streams}


def _judge(result: torch.Tensor, a: torch.Tensor, b: torch.Tensor, what: str, **epilogue: Any) -> float:
    """Error as a fraction of what is allowed: 2x torch's own in the same dtypes, plus one last place of the sums."""
    expected = truth(a, b, **epilogue)
    if expected.numel() == 0:
        return 0.0
    if not bool(result.isfinite().all()):
        raise BrokenError(f"{what}: values that are not finite")
    bias = epilogue.pop("bias", None)
    own = 0.0
    for shift in (0, 1, a.shape[1] // 2):
        turned = composite(a.roll(shift, 1), b.roll(shift, 0), bias, out_dtype=result.dtype, **epilogue)
        own = max(own, float((turned.double() - expected).abs().max()))
    size = (a.double().square() @ b.double().square()).sqrt()
    unit = torch.finfo(result.dtype).eps * expected.abs() + torch.finfo(accumulate_dtype(a.dtype, b.dtype)).eps * size
    share = float(((result.double() - expected).abs() / (2 * own + unit)).nan_to_num(nan=0.0).max())
    if share > 1:
        raise BrokenError(f"{what}: error {share:.2f} of what is allowed, 2x torch's own")
    return share


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise BrokenError(message)
