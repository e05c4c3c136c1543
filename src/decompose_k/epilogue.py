"""Activations of the epilogue by torch's names, for the torch engine and for autograd."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


def apply_activation(x: torch.Tensor, activation: str | None) -> torch.Tensor:
    """activation(x) in x's own dtype; None is the identity."""
    return x if activation is None else ACTIVATIONS[activation](x)
