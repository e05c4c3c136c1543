"""How this torch writes each activation in a compiler's graph, found by tracing it and then looked for in a graph.

The form of an activation after decomposition differs between dtypes and between releases of torch. It is asked for
here, not written down: an activation that a release writes anew is recognised anew.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from decompose_k.epilogue import ACTIVATIONS
from decompose_k.inductor.nodes import is_number

if TYPE_CHECKING:
    from torch.fx import Node

# What models write for the same functions besides torch's own names.
SPELLINGS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], ...]] = {
    "relu": (lambda x: x.clamp(min=0), lambda x: x.clamp_min(0), lambda x: torch.clamp(x, min=0.0)),
    "silu": (lambda x: x * torch.sigmoid(x), lambda x: torch.sigmoid(x) * x),
}


@dataclass(frozen=True, slots=True)
class Place:
    """An argument that is the result of an earlier step; 0 is the activation's input."""

    index: int


@dataclass(frozen=True, slots=True)
class Step:
    """One operator of a form, with `Place` where its argument is computed and constants elsewhere."""

    target: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Form:
    """One way in which an activation is written: steps in order, the last of which gives the result."""

    activation: str
    steps: tuple[Step, ...]


def match_activation(node: Node, dtype: torch.dtype) -> tuple[str, tuple[Node, ...]] | None:
    """The activation that is all that becomes of a node: its name and its nodes in order, the last being its result."""
    for form in forms(dtype):
        found = _match(form, node)
        if found is not None:
            return form.activation, found
    return None


@functools.cache
def forms(dtype: torch.dtype) -> tuple[Form, ...]:
    """The forms of every activation for one dtype, longer ones first, because one may begin like another ends."""
    spelled = [(name, function) for name, function in ACTIVATIONS.items()]
    spelled += [(name, function) for name, functions in SPELLINGS.items() for function in functions]
    found: list[Form] = []
    for name, function in spelled:
        form = _trace(name, function, dtype)
        if form is not None and form not in found:
            found.append(form)
    return tuple(sorted(found, key=lambda form: -len(form.steps)))


def _trace(name: str, function: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> Form | None:
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.fx.experimental.proxy_tensor import make_fx

    with unset_fake_temporarily(), torch.no_grad():
        traced: Any = make_fx(lambda x: function(x), decomposition_table=select_decomp_table())(
            torch.ones(2, 3, dtype=dtype)
        )
    places: dict[Any, Any] = {}
    steps = []
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            places[node] = Place(0)
        elif node.op == "call_function":
            mapped: Any = torch.fx.map_arg((node.args, node.kwargs), places.__getitem__)
            steps.append(Step(node.target, tuple(mapped[0]), tuple(sorted(mapped[1].items()))))
            places[node] = Place(len(steps))
        elif node.op != "output" or node.args[0] is not next(reversed(places)):
            return None
    return Form(name, tuple(steps)) if steps else None


def _match(form: Form, source: Node) -> tuple[Node, ...] | None:
    """The nodes that compute the form from `source`, if `source` and all but the last of them serve nothing else."""
    found = [source]
    for step in form.steps:
        anchor = next((argument for argument in step.args if isinstance(argument, Place)), None)
        if anchor is None:
            return None
        user = next((user for user in found[anchor.index].users if _is_step(user, step, found)), None)
        if user is None:
            return None
        found.append(user)
    inside = set(found)
    if any(user not in inside for node in found[:-1] for user in node.users):
        return None
    return tuple(found[1:])


def _is_step(node: Node, step: Step, found: list[Node]) -> bool:
    if node in found or node.op != "call_function" or node.target is not step.target:
        return False
    return _is_same(node.args, step.args, found) and _is_same(tuple(sorted(node.kwargs.items())), step.kwargs, found)


def _is_same(actual: Any, wanted: Any, found: list[Node]) -> bool:
    if isinstance(wanted, Place):
        return actual is found[wanted.index]
    if isinstance(wanted, (tuple, list)):
        return (
            isinstance(actual, (tuple, list))
            and len(actual) == len(wanted)
            and all(_is_same(one, other, found) for one, other in zip(actual, wanted, strict=True))
        )
    if is_number(wanted) and is_number(actual):
        return bool(actual == wanted)
    return type(actual) is type(wanted) and bool(actual == wanted)
