"""Reading the code that torch's compiler generated: which kernels a compiled product runs, and what that amounts to."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

# A product, at least in part: the words that the compiler makes kernel names of.
_PRODUCT_WORDS = frozenset({"mm", "addmm", "bmm", "baddbmm", "linear"})
_SUBGRAPH = re.compile(r"decompose_k_mm_(\d+)_split")
_EXTERN_PRODUCT = re.compile(r"extern_kernels\.(?:\w+_)?(?:mm|addmm|bmm|baddbmm)\w*$|mkldnn|mkl_linear|_scaled_mm")
_OURS = "torch.ops.decompose_k."


@dataclass(frozen=True, slots=True)
class Generated:
    """One generated program: the kernels it launches in order, and what they amount to.

    `kind` is one of `KINDS`; `split_k` the chunks of K where it says so in the code.
    """

    kind: str
    kernels: tuple[str, ...]
    split_k: int | None
    code: str

    def __str__(self) -> str:
        chunks = "" if self.split_k is None else f" (split_k={self.split_k})"
        return f"{KINDS[self.kind]}{chunks}: {', '.join(self.kernels) or 'no kernel'}"


KINDS = {
    "operator": "one operator of decompose-k",
    "operator, then pointwise": "one operator of decompose-k, then a pointwise kernel",
    "decompose-k": "the compiler's own decompose-k",
    "decompose-k, then pointwise": "the compiler's own decompose-k, then a separate pointwise kernel",
    "template": "one fused template kernel",
    "template, then pointwise": "a template kernel, then a separate pointwise kernel",
    "extern": "an extern product",
    "extern, then pointwise": "an extern product, then a separate pointwise kernel",
    "generated": "generated kernels without a product of their own, such as a sum of products",
    "unknown": "something else",
}


def read(code: str) -> Generated:
    """What a generated program runs.

    >>> read("def call(args):\\n    extern_kernels.mm(a, b, out=c)\\n    cpp_fused_relu_0(c)\\n").kind
    'extern, then pointwise'
    """
    kernels: list[str] = []
    split_k = None
    for function in _functions(code):
        subgraph = _SUBGRAPH.match(function.name)
        if subgraph:
            continue
        kernels += _kernels_of(function)
    for kernel in kernels:
        found = _SUBGRAPH.match(kernel)
        split_k = int(found[1]) if found else split_k
    return Generated(_kind_of(kernels), tuple(kernels), split_k, code)


def _functions(code: str) -> list[ast.FunctionDef]:
    """The functions that run when the program does; the compiler's own benchmarks are in it too, and left out."""
    return [
        node
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.FunctionDef) and not node.name.startswith(("benchmark", "get_args", "recursively"))
    ]


def _kernels_of(function: ast.FunctionDef) -> list[str]:
    names = []
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    for node in sorted(calls, key=lambda node: (node.lineno, node.col_offset)):
        name = ast.unparse(node.func)
        if name.startswith(("triton_", "cpp_")):
            names.append(name.removesuffix(".run"))
        elif name.startswith("extern_kernels."):
            names.append(name)
        elif name.startswith("torch.ops."):
            names.append(name.removesuffix(".default"))
        elif _SUBGRAPH.match(name):
            names.append(name)
    return names


def _kind_of(kernels: list[str]) -> str:
    kinds = [_product_kind(kernel) for kernel in kernels]
    places = [place for place, kind in enumerate(kinds) if kind is not None]
    if not places:
        return "generated" if kernels else "unknown"
    kind = kinds[places[0]]
    if len(places) > 1:
        return "unknown"
    after = kernels[places[0] + 1 :]
    return f"{kind}, then pointwise" if after else str(kind)


def _product_kind(kernel: str) -> str | None:
    if kernel.startswith(_OURS):
        return "operator"
    if _SUBGRAPH.match(kernel):
        return "decompose-k"
    if kernel.startswith("triton_tem_"):
        return "template"
    if kernel.startswith("cpp_") and _PRODUCT_WORDS & set(kernel.split("_")):
        return "template"
    return "extern" if _EXTERN_PRODUCT.search(kernel) else None
