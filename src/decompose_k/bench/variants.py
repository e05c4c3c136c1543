"""The ways to compute a case that are measured side by side: torch's own, and ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from decompose_k.accuracy import mm_of_copies, then_activation, torch_product
from decompose_k.api import matmul
from decompose_k.config import Config
from decompose_k.device import Device
from decompose_k.dtypes import HALVES
from decompose_k.heuristics import candidates
from decompose_k.plan import plan, triton_objection

if TYPE_CHECKING:
    from decompose_k.bench.cases import Case
    from decompose_k.problem import Problem

TORCH = "torch"
TORCH_CAST = "torch-cast"
AUTO = "auto"
STATIC = "static"
SPLIT = "split"
UNFUSED = "unfused"
GENERATION_2 = "generation-2"
GENERATION_1 = "generation-1"
VARIANTS = (TORCH, TORCH_CAST, AUTO, STATIC, SPLIT, UNFUSED, GENERATION_2, GENERATION_1)
DEFAULT_VARIANTS = (TORCH, TORCH_CAST, AUTO, STATIC, SPLIT)
BASELINES = (TORCH, TORCH_CAST)

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to compute a case: what is called, and what a row says about it.

    `choices` are the configs that it could run as well, best guess first, and `build` makes the call of one of them.
    """

    name: str
    label: str
    call: Product
    backend: str
    config: Config | None = None
    static_b: bool = False
    choices: tuple[Config, ...] = ()
    build: Callable[[Config], Product] | None = None

    def with_config(self, config: Config) -> Variant:
        """The same variant, run with another of its choices."""
        if self.build is None:
            raise ValueError(f"variant {self.name} has no config to choose")
        return replace(self, call=self.build(config), backend=config.backend, config=config)

    @property
    def ours(self) -> bool:
        """Whether this is Decompose-K and not a baseline."""
        return self.name not in BASELINES


def variants_of(
    case: Case, device: torch.device | Device, names: Sequence[str] = DEFAULT_VARIANTS
) -> tuple[Variant, ...]:
    """The named variants that exist for a case on a device, torch's own always first.

    A variant that would run the very config of an earlier one is left out. Raises ValueError for an unknown name.
    """
    unknown = [name for name in names if name not in VARIANTS]
    if unknown:
        raise ValueError(f"variant must be one of {', '.join(VARIANTS)}; got {', '.join(map(repr, unknown))}")
    facts = device if isinstance(device, Device) else Device.of(device)
    chosen = [torch_variant(case, facts.type)]
    for name in VARIANTS[1:]:
        variant = _MAKERS[name](case, facts) if name in names else None
        if variant is not None and not _is_repeated(variant, chosen):
            chosen.append(variant)
    return tuple(chosen)


def torch_variant(case: Case, device_type: str) -> Variant:
    """Torch's product as one would write it in these dtypes, and the activation as a call of its own."""
    label, product = torch_product(case.problem(device_type))
    return Variant(TORCH, label, product, "torch")


def split_config(problem: Problem, device: Device) -> Config:
    """The best split form of the torch engine for a problem, by the library's own ranking."""
    choice = plan(problem, device, backend="torch")
    for config in (choice.config, *choice.alternatives):
        if config.kernel == "bmm_sum":
            return config
    return Config("bmm_sum", split_k=min(8, max(1, problem.k)))


def _torch_cast(case: Case, device: Device) -> Variant | None:
    """Halves through fp32 copies: the faster baseline on a CPU without half-precision instructions."""
    shape = case.shape
    if device.type != "cpu" or not shape.a_dtype == shape.b_dtype == shape.out_dtype or shape.a_dtype not in HALVES:
        return None
    product = then_activation(mm_of_copies(torch.float32, torch.float32), case.activation)

    def call(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return product(a, b).to(shape.out_dtype)

    return Variant(TORCH_CAST, "torch.mm of fp32 copies", call, "torch")


def _auto(case: Case, device: Device) -> Variant:
    choice = plan(case.problem(device.type), device)
    return Variant(
        AUTO,
        "Decompose-K, auto",
        _ours(case),
        choice.config.backend,
        choice.config,
        choices=(choice.config, *choice.alternatives) if device.type == "cuda" else (),
        build=lambda config: _ours(case, config=config),
    )


def _static(case: Case, device: Device) -> Variant | None:
    if device.type != "cuda" or not case.shape.has_static_weight:
        return None
    choice = plan(case.problem(device.type, static_b=True), device)
    return Variant(
        STATIC,
        "Decompose-K, static weight",
        _ours(case, static_b=True),
        choice.config.backend,
        choice.config,
        True,
        choices=(choice.config, *choice.alternatives),
        build=lambda config: _ours(case, static_b=True, config=config),
    )


def _split(case: Case, device: Device) -> Variant:
    config = split_config(case.problem(device.type), device)
    return Variant(SPLIT, "Decompose-K in torch, bmm + sum", _ours(case, config=config), config.backend, config)


def _unfused(case: Case, device: Device) -> Variant | None:
    if case.activation is None:
        return None
    choice = plan(replace(case.problem(device.type), activation=None), device)
    bare = replace(case, activation=None)

    def build(config: Config) -> Product:
        return then_activation(_ours(bare, config=config), case.activation)

    return Variant(
        UNFUSED,
        f"Decompose-K, then {case.activation}",
        build(choice.config),
        choice.config.backend,
        choice.config,
        choices=(choice.config, *choice.alternatives) if device.type == "cuda" else (),
        build=build,
    )


def _generation_2(case: Case, device: Device) -> Variant | None:
    return _plain_pair(case, device, GENERATION_2, "generation 2: no dependent launch", "flat")


def _generation_1(case: Case, device: Device) -> Variant | None:
    return _plain_pair(case, device, GENERATION_1, "generation 1: tile reducer", "tile")


def _plain_pair(case: Case, device: Device, name: str, label: str, reducer: str) -> Variant | None:
    """The pair as it runs without dependent launch, with the candidates that a device without it would have."""
    problem = case.problem(device.type)
    found = candidates(problem, replace(device, capability=min(device.capability, (8, 0))))
    pairs = [replace(config, reducer=reducer) for config in found if config.kernel == "pair"]
    choices = tuple(config for config in pairs if triton_objection(config, problem, device) is None)
    if not choices:
        return None
    return Variant(
        name,
        f"Decompose-K, {label}",
        _ours(case, config=choices[0]),
        "triton",
        choices[0],
        choices=choices,
        build=lambda config: _ours(case, config=config),
    )


_MAKERS: dict[str, Callable[[Case, Device], Variant | None]] = {
    TORCH_CAST: _torch_cast,
    AUTO: _auto,
    STATIC: _static,
    SPLIT: _split,
    UNFUSED: _unfused,
    GENERATION_2: _generation_2,
    GENERATION_1: _generation_1,
}


def _is_repeated(variant: Variant, chosen: Sequence[Variant]) -> bool:
    """Whether an earlier variant runs the same config; an unfused activation makes a difference of its own."""
    if variant.config is None or variant.name == UNFUSED:
        return False
    return any(other.config == variant.config and other.static_b == variant.static_b for other in chosen)


def _ours(case: Case, *, config: Config | None = None, static_b: bool = False) -> Product:
    activation, out_dtype = case.activation, case.shape.out_dtype

    def call(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return matmul(a, b, activation=activation, out_dtype=out_dtype, static_b=static_b, config=config)

    return call
