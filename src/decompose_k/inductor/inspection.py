"""Compiling one product with and without Decompose-K, to see what torch's compiler makes of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from decompose_k.dtypes import FLOATS, dtype_name
from decompose_k.epilogue import ACTIVATIONS, apply_activation
from decompose_k.inductor.decide import WINS
from decompose_k.inductor.generated import Generated, read
from decompose_k.inductor.report import Report
from decompose_k.inductor.switch import disable, enable

MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
LAYOUTS = ("NN", "NT")


@dataclass(frozen=True, slots=True)
class Inspection:
    """What the compiler did with a product by itself (`plain`), and after `enable()` (`enabled`), with its report."""

    model: str
    mode: str
    device: str
    plain: Generated
    enabled: Generated
    report: Report

    def __str__(self) -> str:
        lines = [
            f"model    {self.model}, mode {self.mode}, on {self.device}, torch {torch.__version__}",
            f"plain    {self.plain}",
            f"enabled  {self.enabled}",
            *(f"         {line}" for line in str(self.report).splitlines()[1:]),
        ]
        return "\n".join(lines)

    def save(self, folder: Path) -> tuple[Path, Path]:
        """Write both generated programs into a folder, which is made; their paths."""
        folder.mkdir(parents=True, exist_ok=True)
        paths = folder / "plain.py", folder / "enabled.py"
        for path, generated in zip(paths, (self.plain, self.enabled), strict=True):
            path.write_text(generated.code, encoding="utf-8")
        return paths


def inspect_product(
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    activation: str | None = None,
    bias: bool = False,
    layout: str = "NT",
    mode: str = "default",
    dynamic_m: bool = False,
    where: str = WINS,
    device: torch.device | str = "cpu",
) -> Inspection:
    """Compile activation(a @ b + bias) twice and read the generated code; forgets what was compiled before.

    Args:
        m: rows of a, at least 1.
        n: columns of b, at least 1.
        k: the reduced dimension, at least 1.
        dtype: real floating dtype of all tensors.
        activation: None, relu, gelu, gelu_tanh, silu, sigmoid or tanh.
        bias: whether a bias [N] is added.
        layout: `NN`, or `NT` for the weight of a linear layer.
        mode: of torch.compile: default, reduce-overhead, max-autotune or max-autotune-no-cudagraphs.
        dynamic_m: compile for any M.
        where: as for `enable`.
        device: where it runs.

    Raises:
        ValueError: a wrong argument.
    """
    _check(m, n, k, dtype, activation, layout, mode)
    device = torch.device(device)
    tensors = _tensors(m, n, k, dtype, bias, layout, device)
    operands = "a @ weight.T" if layout == "NT" else "a @ b"
    text = f"{operands}{' + bias' if bias else ''}"
    text = text if activation is None else f"{activation}({text})"
    rows = "M" if dynamic_m else str(m)
    disable()
    plain = _compile(tensors, activation, mode, dynamic_m)
    with enable(where) as enabled:
        ours = _compile(tensors, activation, mode, dynamic_m)
        return Inspection(
            f"{text}, [{rows}, {k}] @ [{k}, {n}] {dtype_name(dtype)}", mode, str(device), plain, ours, enabled.report()
        )


def _check(m: Any, n: Any, k: Any, dtype: Any, activation: Any, layout: Any, mode: Any) -> None:
    for name, size in (("m", m), ("n", n), ("k", k)):
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{name} must be an integer >= 1; got {size!r}")
    if dtype not in FLOATS:
        raise ValueError(f"dtype must be one of {', '.join(map(dtype_name, FLOATS))}; got {dtype!r}")
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(f"activation must be None or one of {', '.join(ACTIVATIONS)}; got {activation!r}")
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}; got {layout!r}")
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}; got {mode!r}")


def _tensors(
    m: int, n: int, k: int, dtype: torch.dtype, bias: bool, layout: str, device: torch.device
) -> tuple[torch.Tensor, ...]:
    a = torch.ones(m, k, dtype=dtype, device=device)
    b = torch.ones((n, k) if layout == "NT" else (k, n), dtype=dtype, device=device)
    b = b.t() if layout == "NT" else b
    return (a, b, torch.ones(n, dtype=dtype, device=device)) if bias else (a, b)


def _compile(tensors: tuple[torch.Tensor, ...], activation: str | None, mode: str, dynamic_m: bool) -> Generated:
    """Compile and run the plain model; the last program that was generated is the model's, others tried candidates."""
    from torch._functorch import config as autograd_config
    from torch._inductor import config
    from torch._inductor.utils import run_and_get_code

    def model(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        product = a @ b if bias is None else torch.addmm(bias, a, b)
        return apply_activation(product, activation)

    if dynamic_m:
        torch._dynamo.mark_dynamic(tensors[0], 0)
    # A graph from a cache brings no code along.
    with torch.no_grad(), config.patch(fx_graph_cache=False), autograd_config.patch(enable_autograd_cache=False):
        compiled = torch.compile(model, mode=mode, dynamic=None if dynamic_m else False, fullgraph=True)
        _, codes = run_and_get_code(compiled, *tensors)
    if not codes:
        raise RuntimeError(f"torch {torch.__version__} generated no code")
    return read(codes[-1])
