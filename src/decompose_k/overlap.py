"""Whether strided tensors share memory, decided element by element and not by address ranges alone.

Column slices of one merged buffer interleave in memory without sharing an element, and are common as outputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

# Addresses are listed in blocks, so that a large tensor needs little memory to be checked.
_BLOCK = 1 << 20

Axes = list[tuple[int, int]]


def has_internal_overlap(tensor: torch.Tensor) -> bool:
    """Whether two elements of the tensor have one address, as in an expanded tensor."""
    if tensor.numel() <= 1 or tensor.is_contiguous():
        return False
    axes = _axes(tensor, tensor.element_size())
    if any(stride == 0 for _, stride in axes):
        return True
    if _is_nested(axes):
        return False
    if tensor.numel() > _BLOCK:
        return True
    addresses = torch.cat(list(_addresses(axes)))
    return torch.unique_consecutive(addresses.sort().values).numel() < addresses.numel()


def share_memory(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether an element of x and an element of y have a byte in common.

    Exact wherever one of them is laid out without self-overlap beyond stride 0; else True where the ranges meet.
    """
    if x.numel() == 0 or y.numel() == 0 or x.untyped_storage().data_ptr() != y.untyped_storage().data_ptr():
        return False
    # Views of one storage with unlike element sizes are compared in units of the smaller one.
    unit = min(x.element_size(), y.element_size())
    x_axes, y_axes = _axes(x, unit), _axes(y, unit)
    x_first = int(x.storage_offset()) * (x.element_size() // unit)
    y_first = int(y.storage_offset()) * (y.element_size() // unit)
    if x_first + _extent(x_axes) < y_first or y_first + _extent(y_axes) < x_first:
        return False
    x_axes, y_axes = _distinct(x_axes), _distinct(y_axes)
    if _is_nested(y_axes):
        return any(_contains(block, x_first - y_first, y_axes) for block in _addresses(x_axes))
    if _is_nested(x_axes):
        return any(_contains(block, y_first - x_first, x_axes) for block in _addresses(y_axes))
    return True


def _axes(tensor: torch.Tensor, unit: int) -> Axes:
    """(size, stride) of every dimension longer than 1, widest stride first, in units of `unit` bytes."""
    factor = tensor.element_size() // unit
    axes = [(size, stride * factor) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    if factor > 1:
        axes.append((factor, 1))
    return sorted(axes, key=lambda axis: axis[1], reverse=True)


def _distinct(axes: Axes) -> Axes:
    return [(size, stride) for size, stride in axes if stride != 0]


def _extent(axes: Axes) -> int:
    return sum((size - 1) * stride for size, stride in axes)


def _is_nested(axes: Axes) -> bool:
    """Whether each step is longer than all that lies within it, so that an address has one set of indices."""
    return all(stride > _extent(axes[position + 1 :]) for position, (_, stride) in enumerate(axes))


def _addresses(axes: Axes) -> Iterator[torch.Tensor]:
    """Addresses of all elements relative to the first one, in blocks."""
    count = 1
    for size, _ in axes:
        count *= size
    for first in range(0, count, _BLOCK):
        index = torch.arange(first, min(first + _BLOCK, count))
        address = torch.zeros_like(index)
        for size, stride in reversed(axes):
            address += (index % size) * stride
            index = index // size
        yield address


def _contains(addresses: torch.Tensor, offset: int, axes: Axes) -> bool:
    """Whether one of the addresses, moved by `offset`, belongs to the nested layout."""
    rest = torch.add(addresses, offset)
    for size, stride in axes:
        rest = rest - (rest // stride).clamp(0, size - 1) * stride
    return bool((rest == 0).any())
