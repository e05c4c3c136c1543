"""Models run through the graph pass without Inductor's code generation: compiled in milliseconds, executed by eager."""

from __future__ import annotations

import copy

import torch
from functorch.compile import min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table

from decompose_k.dtypes import accumulate_dtype, dtype_from_name
from decompose_k.inductor.graph_pass import rewrite
from support import last_place

OPERATOR = torch.ops.decompose_k.matmul.default


class Rewriter:
    """A backend of torch.compile that rewrites the joint graph and keeps what it decided and the graphs it made."""

    def __init__(self, where="everywhere"):
        self.where = where
        self.decisions = []
        self.graphs = []
        self.frames = 0
        self.backend = aot_autograd(
            fw_compiler=self._forward,
            bw_compiler=self._backward,
            inference_compiler=self._inference,
            partition_fn=self._partition,
            decompositions=select_decomp_table(),
        )

    def __call__(self, graph_module, inputs, **options):
        self.frames += 1
        return self.backend(graph_module, inputs, **options)

    def compile(self, function, **options):
        torch.compiler.reset()
        return torch.compile(function, backend=self, fullgraph=True, **options)

    @property
    def rewritten(self):
        return [decision for decision in self.decisions if decision.rewritten]

    @property
    def left(self):
        return [decision for decision in self.decisions if not decision.rewritten]

    @property
    def targets(self):
        """What the graphs call, in order."""
        return [node.target for graph in self.graphs for node in graph.nodes if node.op == "call_function"]

    def _rewrite(self, graph_module):
        self.decisions += rewrite(graph_module.graph, self.where)
        graph_module.graph.lint()
        graph_module.recompile()

    def _inference(self, graph_module, inputs):
        self._rewrite(graph_module)
        return self._forward(graph_module, inputs)

    def _partition(self, joint, inputs, **options):
        self._rewrite(joint)
        return min_cut_rematerialization_partition(joint, inputs, **options)

    def _forward(self, graph_module, inputs):
        self.graphs.append(copy.deepcopy(graph_module.graph))
        for node in graph_module.graph.nodes:
            _assert_value_is_known(node)
        return graph_module

    _backward = _forward


def _assert_value_is_known(node):
    if node.op == "call_function" and node.target is OPERATOR:
        value = node.meta["val"]
        assert value.shape[0] == node.args[0].meta["val"].shape[0]
        assert value.dtype == dtype_from_name(node.args[6])


def assert_no_worse(ours, own, truth, what=""):
    """The error against fp64 is at most twice torch's own in the same dtypes, plus a last place of result and sums."""
    assert (ours.shape, ours.dtype, ours.stride()) == (own.shape, own.dtype, own.stride()), what
    truth = truth.double()
    sums = torch.finfo(accumulate_dtype(ours.dtype, ours.dtype)).eps * (1 + truth.abs().max())
    allowed = 2 * (own.double() - truth).abs().max() + last_place(truth, ours.dtype).max() + sums
    error = (ours.double() - truth).abs().max()
    assert float(error) <= float(allowed), f"{what}: error {float(error):.3e}, allowed {float(allowed):.3e}"
