"""The variants of a case on a device, by name: baselines, ours, and read floors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from decompose_k.bench.baselines import BASELINE_MAKERS, torch_eager
from decompose_k.bench.floors import FLOOR_MAKERS
from decompose_k.bench.ours import OWN_MAKERS
from decompose_k.bench.variant import AUTO, DEFAULT_VARIANTS, SPLIT, TORCH, VARIANTS, Variant
from decompose_k.device import Device

if TYPE_CHECKING:
    from decompose_k.bench.cases import Case

_MAKERS: dict[str, Callable[[Case, Device], Variant | None]] = BASELINE_MAKERS | OWN_MAKERS | FLOOR_MAKERS


def variants_of(
    case: Case, device: torch.device | Device, names: Sequence[str] = DEFAULT_VARIANTS
) -> tuple[Variant, ...]:
    """The named variants that exist for a case on a device, torch's own always first.

    The split form is left out where `auto` runs it already. Raises ValueError for an unknown name.
    """
    unknown = [name for name in names if name not in VARIANTS]
    if unknown:
        raise ValueError(f"variant must be one of {', '.join(VARIANTS)}; got {', '.join(map(repr, unknown))}")
    facts = device if isinstance(device, Device) else Device.of(device)
    chosen = [torch_eager(case, facts)]
    for name in VARIANTS:
        variant = _MAKERS[name](case, facts) if name in names and name != TORCH else None
        if variant is not None and not _is_repeated(variant, chosen):
            chosen.append(variant)
    return tuple(chosen)


def _is_repeated(variant: Variant, chosen: Sequence[Variant]) -> bool:
    """Whether this is the split form, and what `auto` chose already."""
    return variant.name == SPLIT and any(other.name == AUTO and other.config == variant.config for other in chosen)
