"""What is measured side by side: a way to compute a case, its name, and what a row says about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from decompose_k.config import Config

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

TORCH = "torch"
TORCH_CAST = "torch-cast"
COMPILED_SPLIT = "compiled-split"
COMPILED = "compiled"
COMPILED_MAX = "compiled-max-autotune"
COMPILED_MAX_NO_GRAPHS = "compiled-max-autotune-no-cudagraphs"
CUSTOM_OP = "custom-op-mm"
CUSTOM_OP_FUSED = "custom-op-mm-relu"
BASELINES = (
    TORCH,
    TORCH_CAST,
    COMPILED_SPLIT,
    COMPILED,
    COMPILED_MAX,
    COMPILED_MAX_NO_GRAPHS,
    CUSTOM_OP,
    CUSTOM_OP_FUSED,
)

AUTO = "auto"
STATIC = "static"
SPLIT = "split"
UNFUSED = "unfused"
GENERATION_3 = "generation-3"
GENERATION_2 = "generation-2"
GENERATION_2_UNFUSED = "generation-2-unfused"
GENERATION_1 = "generation-1"
GENERATION_1_UNFUSED = "generation-1-unfused"
OURS = (
    AUTO,
    STATIC,
    SPLIT,
    UNFUSED,
    GENERATION_3,
    GENERATION_2,
    GENERATION_2_UNFUSED,
    GENERATION_1,
    GENERATION_1_UNFUSED,
)

FLOOR_PLAIN = "floor-plain"
FLOOR_WAIT_FIRST = "floor-wait-first"
FLOOR_STATIC = "floor-static"
FLOORS = (FLOOR_PLAIN, FLOOR_WAIT_FIRST, FLOOR_STATIC)

# How a variant is called where there is room for a few words only.
TITLES = {
    TORCH: "torch eager",
    TORCH_CAST: "torch, fp32 copies",
    COMPILED_SPLIT: "compiled bmm + sum",
    COMPILED: "torch.compile",
    COMPILED_MAX: "max-autotune",
    COMPILED_MAX_NO_GRAPHS: "max-autotune-no-cudagraphs",
    CUSTOM_OP: "custom op mm",
    CUSTOM_OP_FUSED: "custom op mm_relu",
    AUTO: "Decompose-K",
    STATIC: "Decompose-K, static weight",
    SPLIT: "Decompose-K in torch",
    UNFUSED: "Decompose-K, unfused",
    GENERATION_3: "generation 3",
    GENERATION_2: "generation 2",
    GENERATION_2_UNFUSED: "generation 2, unfused",
    GENERATION_1: "generation 1",
    GENERATION_1_UNFUSED: "generation 1, unfused",
    FLOOR_PLAIN: "read floor",
    FLOOR_WAIT_FIRST: "read floor, dependent launch",
    FLOOR_STATIC: "read floor, static weight",
}

VARIANTS = (*BASELINES, *OURS, *FLOORS)
DEFAULT_VARIANTS = (TORCH, TORCH_CAST, AUTO, STATIC, SPLIT)


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to compute a case: what is called, and what a row says about it.

    `choices` are the configs that it could run as well, best guess first, and `build` makes the call of one of them.
    `options` are calls of which the fastest is the variant. `chosen` tells, after the first call, what an autotuner
    inside chose. `error` judges a result that is no product. A call that is not `capturable` runs a CUDA graph of its
    own and cannot be part of ours. Where it is not `fused`, the activation is a call of its own.
    """

    name: str
    label: str
    call: Product
    backend: str
    config: Config | None = None
    static_b: bool = False
    choices: tuple[Config, ...] = ()
    build: Callable[[Config], Product] | None = None
    options: Mapping[str, Product] = field(default_factory=dict)
    chosen: Callable[[], str | None] | None = None
    error: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], float] | None = None
    capturable: bool = True
    fused: bool = True

    def with_config(self, config: Config) -> Variant:
        """The same variant, run with another of its choices."""
        if self.build is None:
            raise ValueError(f"variant {self.name} has no config to choose")
        return replace(self, call=self.build(config), backend=config.backend, config=config)

    def with_option(self, name: str) -> Variant:
        """The same variant, run with another of its options."""
        return replace(self, call=self.options[name], chosen=lambda: name)

    @property
    def ours(self) -> bool:
        """Whether this is Decompose-K: neither a baseline nor a floor."""
        return self.name in OURS

    @property
    def is_floor(self) -> bool:
        """Whether this reads the operands and multiplies nothing."""
        return self.name in FLOORS
