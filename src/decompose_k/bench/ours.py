"""Decompose-K's own variants: what a caller gets, and every generation of the kernels, fused and unfused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from decompose_k.accuracy import then_activation
from decompose_k.api import matmul
from decompose_k.bench.variant import (
    AUTO,
    GENERATION_1,
    GENERATION_1_UNFUSED,
    GENERATION_2,
    GENERATION_2_UNFUSED,
    GENERATION_3,
    SPLIT,
    STATIC,
    UNFUSED,
    Product,
    Variant,
)
from decompose_k.cache import SHIPPED, TUNED
from decompose_k.config import Config
from decompose_k.costs import predict_microseconds
from decompose_k.heuristics import candidates
from decompose_k.plan import Plan, plan, triton_objection

if TYPE_CHECKING:
    import torch

    from decompose_k.bench.cases import Case
    from decompose_k.device import Device
    from decompose_k.problem import Problem

# What a tile reducer takes longer for each split, which it reads one after the other (H200).
_TILE_STEP_US = 0.09


def _open_choices(choice: Plan, device: Device) -> tuple[Config, ...]:
    """What a search may try instead of the choice: nothing where that was measured already, as a caller gets it."""
    if device.type != "cuda" or choice.origin in (TUNED, SHIPPED):
        return ()
    return (choice.config, *choice.alternatives)


def split_config(problem: Problem, device: Device) -> Config:
    """The best split form of the torch engine for a problem, by the library's own ranking."""
    choice = plan(problem, device, backend="torch")
    for config in (choice.config, *choice.alternatives):
        if config.kernel == "bmm_sum":
            return config
    return Config("bmm_sum", split_k=min(8, max(1, problem.k)))


def auto(case: Case, device: Device) -> Variant:
    """What a caller gets who asks for nothing."""
    choice = plan(case.problem(device.type), device)
    return Variant(
        AUTO,
        "Decompose-K, auto",
        _ours(case),
        choice.config.backend,
        choice.config,
        choices=_open_choices(choice, device),
        build=lambda config: _ours(case, config=config),
    )


def static(case: Case, device: Device) -> Variant | None:
    """What a caller gets who promises that nothing in the stream writes the weight."""
    if device.type != "cuda" or not case.static_weight:
        return None
    choice = plan(case.problem(device.type, static_b=True), device)
    return Variant(
        STATIC,
        "Decompose-K, static weight",
        _ours(case, static_b=True),
        choice.config.backend,
        choice.config,
        True,
        choices=_open_choices(choice, device),
        build=lambda config: _ours(case, static_b=True, config=config),
    )


def split(case: Case, device: Device) -> Variant:
    """The split form in torch: bmm over the chunks, then a sum."""
    config = split_config(case.problem(device.type), device)
    return Variant(SPLIT, "Decompose-K in torch, bmm + sum", _ours(case, config=config), config.backend, config)


def unfused(case: Case, device: Device) -> Variant | None:
    """What a caller gets, without the activation, and the activation in a call of its own."""
    if case.activation is None:
        return None
    choice = plan(replace(case.problem(device.type), activation=None), device)
    return _unfused(
        case,
        UNFUSED,
        f"Decompose-K, then {case.activation}",
        _open_choices(choice, device) or (choice.config,),
    )


def generation_3(case: Case, device: Device) -> Variant | None:
    """The pair with dependent launch, also where `auto` would take torch."""
    problem = case.problem(device.type)
    found = (config for config in candidates(problem, device) if config.launch == "wait_first")
    return _generation(case, device, GENERATION_3, "generation 3: dependent launch", found)


def generation_2(case: Case, device: Device) -> Variant | None:
    """The pair without dependent launch."""
    return _generation(
        case, device, GENERATION_2, "generation 2: no dependent launch", _plain_pairs(case, device, "flat")
    )


def generation_1(case: Case, device: Device) -> Variant | None:
    """The pair with the tile reducer."""
    return _generation(case, device, GENERATION_1, "generation 1: tile reducer", _plain_pairs(case, device, "tile"))


def generation_2_unfused(case: Case, device: Device) -> Variant | None:
    """Generation 2, and the activation in a call of its own."""
    return _unfused_pair(case, device, GENERATION_2_UNFUSED, "generation 2", "flat")


def generation_1_unfused(case: Case, device: Device) -> Variant | None:
    """Generation 1, and the activation in a call of its own."""
    return _unfused_pair(case, device, GENERATION_1_UNFUSED, "generation 1", "tile")


OWN_MAKERS: dict[str, Callable[[Case, Device], Variant | None]] = {
    AUTO: auto,
    STATIC: static,
    SPLIT: split,
    UNFUSED: unfused,
    GENERATION_3: generation_3,
    GENERATION_2: generation_2,
    GENERATION_2_UNFUSED: generation_2_unfused,
    GENERATION_1: generation_1,
    GENERATION_1_UNFUSED: generation_1_unfused,
}


def _plain_pairs(case: Case, device: Device, reducer: str) -> list[Config]:
    """The pairs as they run without dependent launch: the candidates that a device without it would have."""
    problem, plain_device = case.problem(device.type), replace(device, capability=min(device.capability, (8, 0)))
    found = [config for config in candidates(problem, plain_device) if config.kernel == "pair"]
    if reducer == "flat":
        return found
    tiled = [_with_tile_reducer(config) for config in found]
    return sorted(
        tiled, key=lambda config: predict_microseconds(config, problem, device) + _TILE_STEP_US * config.split_k
    )


def _with_tile_reducer(config: Config) -> Config:
    """Eight sums a thread: more, and each step of the loop over the splits takes longer."""
    outputs = config.block_m * config.block_n
    return replace(config, reducer="tile", reduce_warps=max(1, min(8, outputs // 256)))


def _usable(case: Case, device: Device, configs: Sequence[Config]) -> tuple[Config, ...]:
    problem = case.problem(device.type)
    return tuple(config for config in configs if triton_objection(config, problem, device) is None)


def _generation(case: Case, device: Device, name: str, label: str, configs: Iterable[Config]) -> Variant | None:
    choices = _usable(case, device, tuple(configs))
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


def _unfused_pair(case: Case, device: Device, name: str, label: str, reducer: str) -> Variant | None:
    if case.activation is None:
        return None
    bare = replace(case, activation=None)
    choices = _usable(bare, device, _plain_pairs(bare, device, reducer))
    return _unfused(case, name, f"Decompose-K, {label}, then {case.activation}", choices) if choices else None


def _unfused(case: Case, name: str, label: str, choices: tuple[Config, ...]) -> Variant:
    bare = replace(case, activation=None)

    def build(config: Config) -> Product:
        return then_activation(_ours(bare, config=config), case.activation)

    first = choices[0]
    return Variant(name, label, build(first), first.backend, first, choices=choices, build=build, fused=False)


def _ours(case: Case, *, config: Config | None = None, static_b: bool = False) -> Product:
    activation, out_dtype = case.activation, case.shape.out_dtype

    def call(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return matmul(a, b, activation=activation, out_dtype=out_dtype, static_b=static_b, config=config)

    return call
