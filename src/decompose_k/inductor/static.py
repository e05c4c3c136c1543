"""Which matrices of a graph are weights that nothing writes: parameters and buffers of a model at inference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch._guards import TracingContext

from decompose_k.inductor.nodes import SHAPE_OPERATORS, is_call

if TYPE_CHECKING:
    from torch.fx import Graph, Node

    from decompose_k.inductor.products import Operand


def static_inputs(graph: Graph) -> frozenset[Node]:
    """The graph's inputs that are parameters or buffers, and that the graph does not write either.

    The compiler tells them apart for a graph of inference alone: none are static in training, whose optimizer writes
    them just before.
    """
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    facts: Any = getattr(TracingContext.try_get(), "fw_metadata", None)
    # Private to the compiler: where it says anything else than one fact an input, nothing is taken for static.
    inputs_facts = getattr(facts, "input_info", ())
    if len(inputs_facts) != len(inputs):
        return frozenset()
    places = getattr(facts, "static_input_indices", None) or ()
    return frozenset(inputs[place] for place in places if not inputs_facts[place].mutates_data)


def is_static(operand: Operand, static: frozenset[Node]) -> bool:
    """Whether a matrix is one of these inputs, seen through changes of shape."""
    node: Any = operand.source
    while is_call(node, *SHAPE_OPERATORS):
        node = node.args[0]
    return node in static
