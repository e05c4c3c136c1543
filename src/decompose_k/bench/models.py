"""Models with skinny layers, compiled with and without Decompose-K: checked against fp64, timed side by side.

`python -m decompose_k.bench.models` measures them on a GPU, or a small form of them on a CPU, into a file of rows.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from decompose_k.bench.machine import Machine
from decompose_k.inductor import enable
from decompose_k.inductor.decide import WHERE
from decompose_k.timing import Timing, time_variants

ROWS_OF_X = (1, 2, 8, 16, 32, 64, 128, 256, 512)
# Beyond 1 a size stays open in a compiled graph; these bounds let the compiler's pass see that M stays small.
MOST_ROWS = 512
# One replay is to last long enough for the host to queue the next.
_CALLS_A_GRAPH = 20
_INPUT_SETS = 4
OURS, OURS_STATIC = "decompose-k", "decompose-k, static weights"


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes of the models: width of the residual stream, heads of the attention, experts and their width."""

    width: int
    heads: int
    experts: int
    expert_width: int


FULL = Scale(width=4096, heads=32, experts=64, expert_width=64)
SMALL = Scale(width=512, heads=4, experts=8, expert_width=16)


class SkinnyHeads(nn.Module):
    """An MLP with a low-rank adapter, and the narrow heads of a policy, a value and a gate on it."""

    def __init__(self, scale: Scale, dtype: torch.dtype) -> None:
        super().__init__()
        width = scale.width
        self.norm = nn.RMSNorm(width, dtype=dtype)
        self.shrink = nn.Linear(width, 16, bias=False, dtype=dtype)
        self.grow = nn.Linear(16, width, bias=False, dtype=dtype)
        self.policy = nn.Linear(width, 32, dtype=dtype)
        self.value = nn.Linear(width, 1, dtype=dtype)
        self.gate = nn.Linear(width, 64, dtype=dtype)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Policy logits [M, 32], values [M, 1] and gates [M, 64] of x [M, width], all in fp32 but the policy."""
        hidden = x + self.grow(F.silu(self.shrink(self.norm(x))))
        return self.policy(hidden), torch.tanh(self.value(hidden)).float(), torch.sigmoid(self.gate(hidden)).float()


class MoeBlock(nn.Module):
    """A transformer block: attention, then experts that a sigmoid router weighs.

    Every expert sees every token, weighed by its score: a choice of the best few would jump where two scores are equal
    up to rounding, and no bound on errors would hold.
    """

    def __init__(self, scale: Scale, dtype: torch.dtype) -> None:
        super().__init__()
        width = scale.width
        self.heads = scale.heads
        self.first_norm = nn.RMSNorm(width, dtype=dtype)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False, dtype=dtype)
        self.output = nn.Linear(width, width, bias=False, dtype=dtype)
        self.second_norm = nn.RMSNorm(width, dtype=dtype)
        self.router = nn.Linear(width, scale.experts, dtype=dtype)
        self.up = nn.Parameter(torch.empty(scale.experts, width, scale.expert_width, dtype=dtype))
        self.down = nn.Parameter(torch.empty(scale.experts, scale.expert_width, width, dtype=dtype))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The block's output [M, width] and the router's scores [M, experts] in fp32 for tokens x [M, width]."""
        tokens, width = x.shape
        query, key, value = (
            part.view(tokens, self.heads, width // self.heads).transpose(0, 1)
            for part in self.query_key_value(self.first_norm(x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(query[None], key[None], value[None], is_causal=True)[0]
        x = x + self.output(attended.transpose(0, 1).reshape(tokens, width))
        hidden = self.second_norm(x)
        scores = torch.sigmoid(self.router(hidden)).float()
        weights = (scores / scores.sum(-1, keepdim=True)).to(x.dtype)
        inner = F.silu(torch.einsum("mw,ewf->emf", hidden, self.up)) * weights.t()[:, :, None]
        return x + torch.einsum("emf,efw->mw", inner, self.down), scores


MODELS: dict[str, Callable[[Scale, torch.dtype], nn.Module]] = {"skinny heads": SkinnyHeads, "moe block": MoeBlock}


def make_model(name: str, scale: Scale, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """A model with the same random weights everywhere, scaled so that activations stay about 1."""
    model = MODELS[name](scale, dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                fan_in = parameter.shape[1]
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * fan_in**-0.5)
            else:
                parameter.fill_(0.5)
    return model.to(device).eval()


def make_input(m: int, scale: Scale, dtype: torch.dtype, device: torch.device, seed: int = 0) -> torch.Tensor:
    """Random tokens x [M, width]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(m, scale.width, generator=generator).to(dtype).to(device)


def compile_apart(model: nn.Module, name: str, **options: Any) -> Callable[[torch.Tensor], tuple[torch.Tensor, ...]]:
    """`torch.compile(model)`, apart from every other compilation of it.

    torch keeps compiled graphs by the code that they come from, and would serve one model from the graphs of another.
    """

    def call(x: torch.Tensor) -> Any:
        return model(x)

    code = call.__code__.replace(co_name=f"call_{name}")
    own = types.FunctionType(code, call.__globals__, code.co_name, None, call.__closure__)
    compiled: Callable[[torch.Tensor], tuple[torch.Tensor, ...]] = torch.compile(own, fullgraph=True, **options)
    return compiled


def warm_up(call: Callable[[torch.Tensor], Any], scale: Scale, dtype: torch.dtype, device: torch.device) -> None:
    """Compile for one row, which is a graph of its own, and for any number of rows up to 512."""
    call(make_input(1, scale, dtype, device))
    x = make_input(16, scale, dtype, device)
    torch._dynamo.mark_dynamic(x, 0, min=2, max=MOST_ROWS)
    call(x)


@dataclass(frozen=True, slots=True)
class ModelRow:
    """One variant of one model at one M: times in microseconds, error relative to fp64 (Frobenius, over all outputs).

    `rewritten` counts the products that became operators of this library when the model was compiled.
    """

    model: str
    variant: str
    mode: str
    m: int
    dtype: str
    p20_us: float
    p50_us: float
    p80_us: float
    repetitions: int
    timing: str
    error: float
    rewritten: int
    device: str
    torch: str
    triton: str | None
    version: str
    commit: str | None
    date: str

    def to_json(self) -> dict[str, Any]:
        """Plain values for a JSON file."""
        return asdict(self)


def measure(
    name: str,
    scale: Scale,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.bfloat16,
    rows_of_x: Sequence[int] = ROWS_OF_X,
    where: str = "wins",
    repetitions: int = 20,
) -> Iterator[ModelRow]:
    """Rows of a model eager, compiled, and compiled after `enable()`, without and with static weights, at each M.

    Raises ValueError where a result is wrong. Of the compiled ones each is one graph for M = 1 and one for all others.
    On a GPU every variant runs inside a CUDA graph of the timer's, so that no host time is in the numbers.
    """
    model = make_model(name, scale, dtype, device)
    exact = copy.deepcopy(model).double()
    machine = Machine.of(device)
    with torch.no_grad():
        plain = compile_apart(model, "plain")
        warm_up(plain, scale, dtype, device)
        variants: dict[str, Callable[..., Any]] = {"eager": model, "compiled": plain}
        rewritten: dict[str, int] = {}
        for variant, apart, static in ((OURS, "enabled", False), (OURS_STATIC, "static", True)):
            with enable(where, static_weights=static) as enabled:
                variants[variant] = compile_apart(model, apart)
                warm_up(variants[variant], scale, dtype, device)
                rewritten[variant] = len(enabled.report().rewritten)
        for m in rows_of_x:
            inputs = [(make_input(m, scale, dtype, device, seed),) for seed in range(_INPUT_SETS)]
            truth = exact(inputs[0][0].double())
            errors = {variant: error_of(call(*inputs[0]), truth) for variant, call in variants.items()}
            if max(errors[OURS], errors[OURS_STATIC]) > 2 * errors["compiled"]:
                raise ValueError(f"{name} at M = {m} is wrong: errors {errors}")
            timings = time_variants(
                variants,
                inputs,
                device,
                bytes_per_set=sum(weight.nbytes for weight in model.parameters()),
                repetitions=repetitions,
                graph_calls=_CALLS_A_GRAPH,
            )
            for variant, timing in timings.items():
                yield _row(machine, name, variant, m, dtype, timing, errors[variant], rewritten.get(variant, 0))


def error_of(results: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> float:
    """Frobenius norm of the error relative to that of the truth, over all results."""
    wrong = sum(float((result.double() - true).square().sum()) for result, true in zip(results, truth, strict=True))
    return float((wrong / sum(float(true.square().sum()) for true in truth)) ** 0.5)


def _row(
    machine: Machine, name: str, variant: str, m: int, dtype: torch.dtype, timing: Timing, error: float, rewritten: int
) -> ModelRow:
    return ModelRow(
        model=name,
        variant=variant,
        mode="default",
        m=m,
        dtype=str(dtype).removeprefix("torch."),
        p20_us=timing.p20_us,
        p50_us=timing.p50_us,
        p80_us=timing.p80_us,
        repetitions=timing.repetitions,
        timing=timing.method,
        error=error,
        rewritten=rewritten,
        device=machine.device,
        torch=machine.torch,
        triton=machine.triton,
        version=machine.version,
        commit=machine.commit,
        date=machine.date,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the models and print one line a row; rows go to a file of JSON lines, at its end."""
    parser = argparse.ArgumentParser(prog="python -m decompose_k.bench.models", description=measure.__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--output", type=Path, required=True, help="file of rows, one JSON object a line")
    parser.add_argument("--model", choices=tuple(MODELS), action="append", help="repeated; all by default")
    parser.add_argument("--m", default=",".join(map(str, ROWS_OF_X)), help="such as 1,16,64; at most 512")
    parser.add_argument("--where", default="wins", choices=WHERE)
    parser.add_argument("--small", action="store_true", help="the small form, as always on a CPU")
    parser.add_argument("--repetitions", type=int, default=20)
    chosen = parser.parse_args(arguments)
    device = torch.device(chosen.device)
    scale = SMALL if chosen.small or device.type == "cpu" else FULL
    try:
        rows_of_x = [int(text) for text in chosen.m.split(",")]
    except ValueError:
        rows_of_x = []
    if not rows_of_x or min(rows_of_x) < 1 or max(rows_of_x) > MOST_ROWS:
        parser.error(f"--m must be integers from 1 to {MOST_ROWS} such as 1,16,64; got {chosen.m!r}")
    for name in chosen.model or MODELS:
        for row in measure(
            name, scale, device, rows_of_x=rows_of_x, where=chosen.where, repetitions=chosen.repetitions
        ):
            with chosen.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row.to_json()) + "\n")
            sys.stdout.write(f"{row.model:13} M={row.m:<4} {row.variant:12} {row.p50_us:9.2f} us  {row.error:.1e}\n")


if __name__ == "__main__":
    main()
