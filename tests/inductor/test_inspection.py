"""Generated programs are read right, the compiler's own and ours; `inspect` says what happened to a product."""

from __future__ import annotations

import shutil

import pytest
import torch

import decompose_k as dk
from decompose_k.inductor.generated import KINDS, read

HEAD = '''
from torch._inductor.select_algorithm import extern_kernels
async_compile = AsyncCompile()
triton_poi_fused_relu_0 = async_compile.triton('triton_poi_fused_relu_0', """
def triton_poi_fused_relu_0(in_out_ptr0):
    extern_kernels.mm(not, code)
""")
'''
FOOT = """
def benchmark_compiled_module(args):
    extern_kernels.mm(args)
def get_args():
    return triton_poi_fused_relu_0.run()
"""


def program(*lines, method=True):
    body = [f"        {line}" if method else f"    {line}" for line in lines]
    head = ["class Runner:", "    def call(self, args):"] if method else ["def call(args):"]
    return "\n".join([HEAD, *head, *body, FOOT])


SUBGRAPH = """
def decompose_k_mm_32_split_7(args):
    extern_kernels.bmm_dtype(a, b, out_dtype=torch.float32, out=c)
    triton_red_fused_mm_0.run(c, d)
    return (d, )
"""
PROGRAMS = {
    "extern, then pointwise": (program("extern_kernels.mm(a, b, out=c)", "triton_poi_fused_relu_0.run(c)"), None),
    "extern": (program("extern_kernels.bias_addmm(a, b, out=c)", method=False), None),
    "template": (program("triton_tem_fused_mm_relu_0.run(a, b, c)"), None),
    "template, then pointwise": (program("triton_tem_fused_mm_0.run(a, b)", "triton_poi_fused_relu_1.run(c)"), None),
    "decompose-k, then pointwise": (
        SUBGRAPH + program("[c] = decompose_k_mm_32_split_7([a, b])", "triton_poi_fused_relu_1.run(c)"),
        32,
    ),
    "decompose-k": (SUBGRAPH + program("[c] = decompose_k_mm_32_split_7([a, b])"), 32),
    "operator": (program("c = torch.ops.decompose_k.matmul.default(a, b, None, 1.0, 1.0, 'relu', 'bf16')"), None),
    "operator, then pointwise": (
        program("c = torch.ops.decompose_k.matmul.default(a, b)", "triton_poi_fused_sin_0.run(c)"),
        None,
    ),
    "generated": (program("triton_red_fused_mm_relu_0.run(a, b, c)"), None),
    "unknown": (program("return (a, )"), None),
}


@pytest.mark.parametrize("kind", PROGRAMS)
def test_kinds(kind):
    code, split_k = PROGRAMS[kind]
    found = read(code)
    assert (found.kind, found.split_k) == (kind, split_k)
    assert str(found).startswith(KINDS[kind])
    assert found.code == code


def test_every_kind_is_tried():
    assert set(PROGRAMS) == set(KINDS)


def test_partitions_and_cpu_templates():
    partition = (
        f"{HEAD}\ndef partition_0(args):\n    extern_kernels.mm(a, b, out=c)\n    triton_poi_fused_relu_0.run(c)\n"
    )
    partition += "class Runner:\n    def call(self, args):\n        (c,) = self.partitions[0](args)\n"
    assert read(partition).kernels == ("extern_kernels.mm", "triton_poi_fused_relu_0")
    assert read(program("cpp_fused_mm_relu_0(a, b, c)")).kind == "template"
    assert read(program("cpp_fused_relu_0(c)")).kind == "generated"
    assert read(program("extern_kernels.mm(a, b, out=c)", "extern_kernels.mm(c, b, out=d)")).kind == "unknown"


WRONG = {
    "m": ({"m": 0}, "m must be an integer >= 1; got 0"),
    "k": ({"k": True}, "k must be an integer >= 1; got True"),
    "dtype": ({"dtype": torch.int32}, "dtype must be one of fp16, bf16, fp32, fp64; got torch.int32"),
    "activation": ({"activation": "swish"}, "activation must be None or one of relu"),
    "layout": ({"layout": "TT"}, "layout must be one of NN, NT; got 'TT'"),
    "mode": ({"mode": "fast"}, "mode must be one of default, reduce-overhead"),
    "where": ({"where": "here"}, "where must be one of wins, everywhere; got 'here'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name):
    arguments, message = WRONG[name]
    with pytest.raises(ValueError, match=r"^" + message.replace("(", r"\(")):
        dk.inductor.inspect_product(**{"m": 4, "n": 4, "k": 64, **arguments})


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on a CPU")


@needs_compiler
@pytest.mark.parametrize("dynamic_m", [False, True], ids=["static", "dynamic"])
def test_a_product_on_this_machine(dynamic_m, tmp_path):
    found = dk.inductor.inspect_product(
        64, 48, 8192, activation="silu", bias=True, dynamic_m=dynamic_m, where="everywhere"
    )
    assert found.plain.kind == "extern, then pointwise"
    assert found.enabled.kind == "operator"
    assert found.enabled.kernels == ("torch.ops.decompose_k.matmul",)
    assert [decision.fused for decision in found.report.rewritten] == [("bias", "silu")]
    text = str(found)
    assert text.startswith(f"model    silu(a @ weight.T + bias), [{'M' if dynamic_m else 64}, 8192] @ [8192, 48] bf16")
    assert "plain    an extern product, then a separate pointwise kernel: extern_kernels." in text
    plain, enabled = found.save(tmp_path / "code")
    assert plain.read_text() == found.plain.code
    assert "torch.ops.decompose_k.matmul.default(" in enabled.read_text()
    assert not dk.inductor.is_enabled()


@needs_compiler
def test_a_product_that_is_left_alone():
    found = dk.inductor.inspect_product(8, 8, 256, torch.float32, activation="relu")
    assert found.plain.kernels == found.enabled.kernels
    assert found.report.rewritten == ()
    assert "because torch's own kernel is the best of the torch engine on cpu" in str(found)
