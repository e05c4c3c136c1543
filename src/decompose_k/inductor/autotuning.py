"""torch's own custom-operator autotuning with Decompose-K among the candidates.

Each set of settings is an operator of its own, whose name has a hash of the settings and of this package's code: torch
keys its cache of compiled graphs by operators, not by what is registered for them. Products of plain models reach the
operator by a graph pass. `aten.mm` itself is left alone: a registration for it would be one for the whole process,
which another library's would replace in silence, and which torch 2.11 does not take.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.fx.experimental.symbolic_shapes import has_static_value

from decompose_k._version import __version__
from decompose_k.arguments import MATMUL, check_operands
from decompose_k.dtypes import FLOATS, dtype_name
from decompose_k.epilogue import apply_activation
from decompose_k.inductor.candidates import candidates
from decompose_k.inductor.graph_pass import fingerprint, make_result, put_in_place, spans_a_write
from decompose_k.inductor.nodes import place_of
from decompose_k.inductor.products import Product, objection, product_of
from decompose_k.inductor.report import Decision
from decompose_k.inductor.sizes import hint_of
from decompose_k.inductor.slots import Installed, SlotPass, install
from decompose_k.inductor.tails import tails_of
from decompose_k.ops import autocast_rule, batched
from decompose_k.settings import default_backend

if TYPE_CHECKING:
    from torch.fx import Graph, Node

BOUNDARIES: dict[str, str | None] = {"mm": None, "mm_relu": "relu"}
DISPATCHES = ("exact", "range")
SPLIT_POINTS = (1, 8, 32, 128, 512)
# How much longer K must be than M and N for a product to be measured. Inductor's rule asks for 32, and misses some.
LEAST_RATIO = 8


@dataclass(frozen=True, slots=True)
class TuningSettings:
    """What one autotuned operator is made from; see `autotune`."""

    boundary: str
    dispatch: str
    split_points: tuple[int, ...]
    largest_m: int
    min_speedup: float
    cuda_graphs: bool
    backend: str


class Autotuned:
    """An autotuned product: call it with a [M, K] and b [K, N], or enter it to have compiled models use it."""

    def __init__(self, settings: TuningSettings) -> None:
        self.settings = settings
        self._exact = _operator(replace(settings, dispatch="exact"))
        self._ranged = _operator(settings)
        self._installed: list[Installed] = []

    def operator_for(self, m: Any, n: Any, k: Any) -> Any:
        """The operator that a compiled graph calls for sizes that may be symbolic.

        Ranges are for a dynamic M alone: measured with one M, torch's ranges contradict its graph, and with a dynamic K
        or N torch 2.11 fails to lower them.
        """
        is_ranged = not has_static_value(m) and has_static_value(n) and has_static_value(k)
        return self._ranged if is_ranged else self._exact

    def __call__(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """activation(a @ b), measured when a graph that has it is compiled; torch's own product outside of one."""
        check_operands(a, b, MATMUL, b_rows=0, least_rank=2)
        if a.dim() != 2 or a.dtype != b.dtype or a.dtype not in FLOATS:
            raise ValueError(
                f"a must have 2 dimensions and the real floating dtype of b; got shape {tuple(a.shape)},"
                f" {dtype_name(a.dtype)} and {dtype_name(b.dtype)}"
            )
        result: torch.Tensor = self.operator_for(a.shape[0], b.shape[1], a.shape[1])(a, b)
        return result

    def enable(self) -> Installed:
        """Have models compiled from now on use it, until the handle's `disable()`."""
        return install(AutotunePass(self))

    def __enter__(self) -> Installed:
        self._installed.append(self.enable())
        return self._installed[-1]

    def __exit__(self, *error: object) -> None:
        self._installed.pop().disable()


class AutotunePass(SlotPass):
    """Puts an autotuned operator in the place of the products at its boundary."""

    def __init__(self, tuned: Autotuned) -> None:
        super().__init__()
        self.tuned = tuned

    def key(self) -> str:
        """What the operators' names are made of."""
        return f"autotune-{_digest(self.tuned.settings)}"

    def rewrite(self, graph: Graph) -> list[Decision]:
        """One operator for each product with a long K."""
        decisions = []
        erased: set[Node] = set()
        for node in list(graph.nodes):
            product = None if node in erased else product_of(node)
            if product is not None:
                decisions.append(self._rewrite_product(graph, product, erased))
        return decisions

    def _rewrite_product(self, graph: Graph, product: Product, erased: set[Node]) -> Decision:
        obstacle = objection(product) or self._objection(product)
        activation = BOUNDARIES[self.tuned.settings.boundary]
        fused = () if activation is None else (activation,)
        if obstacle is None:
            obstacle = f"no {activation} follows alone"
            for tail in tails_of(product):
                if tail.fused != fused or tail.bias is not None or tail.alpha != 1 or spans_a_write(product, tail):
                    continue
                args = (product.a.source, product.b.source)
                m, n = product.value.shape
                operator = self.tuned.operator_for(m, n, product.a.value.shape[1])
                make = functools.partial(make_result, graph, product, tail, operator, args)
                if put_in_place(graph, tail, make, erased):
                    obstacle = None
                break
        reason = obstacle or f"K is at least {LEAST_RATIO} times M and N"
        place = place_of(product.node)
        return Decision(product.operator, product.operands, place, obstacle is None, reason, () if obstacle else fused)

    def _objection(self, product: Product) -> str | None:
        a, b = product.a.value, product.b.value
        if product.bias is not None or product.is_sum:
            return "only plain products are at this boundary"
        if not a.dtype == b.dtype == product.value.dtype:
            return "the result has another dtype than the operands"
        m, n, k = hint_of(a.shape[0]), hint_of(b.shape[1]), hint_of(a.shape[1])
        if m is None or n is None or k is None or 0 in (m, n, k):
            return "sizes are empty or depend on data"
        if k < LEAST_RATIO * max(m, n):
            return f"K is less than {LEAST_RATIO} times M or N"
        return None


def autotune(
    boundary: str = "mm_relu",
    *,
    dispatch: str = "exact",
    split_points: tuple[int, ...] = SPLIT_POINTS,
    largest_m: int = 1024,
    min_speedup: float = 1.0,
    cuda_graphs: bool = False,
) -> Autotuned:
    """Let torch's compiler measure Decompose-K against its own product, and take the fastest.

    out = a @ b at the boundary `mm`, relu(a @ b) at `mm_relu`, where a winner made of torch's operators becomes part of
    the compiler's own kernels. Measuring happens whenever a graph is compiled, in every mode.

    Args:
        boundary: `mm` or `mm_relu`: what the candidates compute.
        dispatch: `exact` measures at the size that a graph is compiled for. `range` measures at the upper end of each
            range of M that `split_points` make, and the compiled graph takes the winner of the range that M falls in.
        split_points: last M of each range but the last, ascending.
        largest_m: the M at which the last range is measured.
        min_speedup: how many times faster than torch's own product a candidate must be. Other than 1 needs torch 2.12.
        cuda_graphs: measure with CUDA graphs, so that the host's time does not count. Needs torch 2.12.

    Returns:
        An operator to call with two matrices, and a context manager: models compiled inside it have their products with
        a K of at least 8 times M and N measured.

    Raises:
        TypeError, ValueError: a wrong argument.
        RuntimeError: this torch cannot do what was asked for.

    >>> tuned = autotune("mm_relu")
    >>> tuned(torch.ones(1, 512), torch.ones(512, 2))
    tensor([[512., 512.]])
    """
    _check(boundary, dispatch, split_points, largest_m, min_speedup, cuda_graphs)
    backend = default_backend()
    return Autotuned(
        TuningSettings(boundary, dispatch, tuple(split_points), largest_m, float(min_speedup), cuda_graphs, backend)
    )


def _check(boundary: Any, dispatch: Any, split_points: Any, largest_m: Any, min_speedup: Any, cuda_graphs: Any) -> None:
    if boundary not in BOUNDARIES:
        raise ValueError(f"boundary must be one of {', '.join(BOUNDARIES)}; got {boundary!r}")
    if dispatch not in DISPATCHES:
        raise ValueError(f"dispatch must be one of {', '.join(DISPATCHES)}; got {dispatch!r}")
    points = tuple(split_points) if isinstance(split_points, (tuple, list)) else ()
    if not points or any(not isinstance(point, int) or isinstance(point, bool) or point < 1 for point in points):
        raise ValueError(f"split_points must be integers >= 1, at least one; got {split_points!r}")
    if sorted(set(points)) != list(points):
        raise ValueError(f"split_points must ascend; got {split_points!r}")
    if not isinstance(largest_m, int) or isinstance(largest_m, bool) or largest_m <= points[-1]:
        raise ValueError(f"largest_m must be an integer above the last of split_points; got {largest_m!r}")
    if not isinstance(min_speedup, (int, float)) or isinstance(min_speedup, bool) or not 1 <= min_speedup < 1e6:
        raise ValueError(f"min_speedup must be a number >= 1; got {min_speedup!r}")
    if not isinstance(cuda_graphs, bool):
        raise TypeError(f"cuda_graphs must be True or False; got {cuda_graphs!r}")


def _digest(settings: TuningSettings) -> str:
    return hashlib.sha256(repr((__version__, fingerprint(), astuple(settings))).encode()).hexdigest()[:12]


@functools.cache
def _operator(settings: TuningSettings) -> Any:
    """The operator of these settings, defined and registered once in a process."""
    register, config_class = _torch_autotuning()
    keywords = _keywords(settings, register)
    activation = BOUNDARIES[settings.boundary]
    definition = _define(f"decompose_k::autotuned_{settings.boundary}_{_digest(settings)}", activation)

    def generate(fakes: dict[str, torch.Tensor]) -> list[Any]:
        a, b = tuple(fakes.values())[:2]
        return [config_class(compute) for compute in candidates(a, b, activation)]

    register(definition, config_generator=generate, **keywords)
    _realize_operands_of(definition._opoverload)
    return definition._opoverload


def _realize_operands_of(operator: Any) -> None:
    """Let the operator's lowering find its operands in memory: torch's own fails on one that it has yet to compute."""
    from torch._inductor import lowering

    # torch 2.12 looks for such lowerings in a table of their own, torch 2.11 among all others.
    own_table = getattr(lowering, "user_lowerings", {})
    table = own_table if operator in own_table else lowering.lowerings
    lower = table[operator]

    @functools.wraps(lower)
    def realized(*operands: Any) -> Any:
        for operand in operands:
            operand.realize()
        return lower(*operands)

    table[operator] = realized


def _torch_autotuning() -> tuple[Any, Any]:
    try:
        from torch._inductor.kernel.custom_op import CustomOpConfig, register_custom_op_autotuning
    except ImportError as error:
        raise RuntimeError(f"autotune needs a part of torch that torch {torch.__version__} lacks: {error}") from error
    return register_custom_op_autotuning, CustomOpConfig


def _keywords(settings: TuningSettings, register: Any) -> dict[str, Any]:
    """The settings as this torch takes them; raises RuntimeError for what it does not know."""
    wanted: dict[str, Any] = {}
    if settings.dispatch == "range":
        # The dispatched tensor comes first in the operator: torch reads the size of the first one whatever the name.
        wanted["dispatch_on"] = {"tensor_name": "a", "dim": 0, "range_upper_bound": settings.largest_m}
        wanted["split_points"] = list(settings.split_points)
    if settings.min_speedup != 1.0:
        wanted["min_speedup_threshold"] = settings.min_speedup
    if settings.cuda_graphs:
        wanted["benchmark_with_cudagraphs"] = True
    known = inspect.signature(register).parameters
    names = {"min_speedup_threshold": "min_speedup", "benchmark_with_cudagraphs": "cuda_graphs"}
    for keyword in wanted:
        if keyword not in known:
            name = names.get(keyword, "dispatch")
            raise RuntimeError(f"{name} needs torch 2.12: autotuning in torch {torch.__version__} has no {keyword}")
    return wanted


def _define(name: str, activation: str | None) -> Any:
    """A custom operator activation(a @ b) with fake tensors, gradients, vmap and autocast."""

    def run(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return apply_activation(torch.mm(a, b), activation)

    def shape_of_result(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a.new_empty((a.shape[0], b.shape[1]))

    def save(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs, output)

    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b, output = ctx.saved_tensors
        if activation == "relu":
            grad = torch.ops.aten.threshold_backward(grad, output, 0)
        return grad @ b.mH, a.mH @ grad

    def vmap(info: Any, in_dims: tuple[int | None, ...], a: torch.Tensor, b: torch.Tensor) -> Any:
        return batched(lambda a, b, _: definition(a, b), info.batch_size, (*in_dims, None), a, b, None)

    definition = torch.library.custom_op(
        name, run, mutates_args=(), schema="(Tensor a, Tensor b) -> Tensor", tags=(torch.Tag.needs_exact_strides,)
    )
    definition.register_fake(shape_of_result)
    definition.register_autograd(backward, setup_context=save)
    definition.register_vmap(vmap)
    for key in (torch._C.DispatchKey.AutocastCPU, torch._C.DispatchKey.AutocastCUDA):
        definition._lib.impl(definition._name, autocast_rule(key, definition._opoverload), key.name)
    return definition
