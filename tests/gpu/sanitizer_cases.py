"""A few calls of every kernel, small enough for compute-sanitizer; run as a program.

With `--planted` it does one thing that memcheck must find: a kernel of ours stores just past the end of its output.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch

from decompose_k.config import Config
from decompose_k.kernels.engine import triton_matmul
from decompose_k.kernels.partial import partial_launch

PAIR = Config("pair", split_k=3, block_k=64, num_stages=3, launch="wait_first", prefetch="ab", reserve_kib=144)
BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
CASES = (
    (PAIR, BF16, BF16),
    (replace(PAIR, launch="plain", prefetch="", reserve_kib=0, reducer="tile"), BF16, BF16),
    (replace(PAIR, split_k=8, num_stages=1, launch="static_b", prefetch="a", reserve_kib=108), BF16, BF16),
    (replace(PAIR, input_precision="tf32x3"), FP32, FP32),
    (replace(PAIR, input_precision="tf32x3"), BF16, FP32),
    (replace(PAIR, block_k=32), FP64, FP64),
    (Config("dot", block_n=2, block_k=512, launch="wait_first", prefetch="b"), BF16, BF16),
    (Config("dot", block_n=2, block_k=512, launch="static_b"), BF16, BF16),
)
# Column-major b takes the other way through the masks and the prefetch.
TRANSPOSED = (PAIR, CASES[-2][0])


def check(config: Config, a: torch.Tensor, b: torch.Tensor) -> None:
    a[0, 0] = float("inf")
    bias = torch.randn(b.shape[1], device="cuda")
    out_dtype = FP64 if a.dtype == FP64 else FP32
    out = triton_matmul(config, a, b, bias=bias, activation="gelu", out_dtype=out_dtype)
    expected = torch.nn.functional.gelu(a[1:].double() @ b.double() + bias)
    torch.testing.assert_close(out[1:].double(), expected, rtol=1e-3, atol=1e-3)


def store_past_the_end() -> None:
    """Give stage 1 a workspace that is one row short."""
    a, b = torch.ones(16, 64, device="cuda", dtype=BF16), torch.ones(64, 16, device="cuda", dtype=BF16)
    partial_launch(a, b, torch.empty(1, 15, 16, device="cuda"), Config("pair", block_k=64)).run()


def main() -> None:
    if "--planted" in sys.argv:
        store_past_the_end()
    else:
        for config, a_dtype, b_dtype in CASES:
            m = 2 if config.kernel == "dot" else 19
            a = torch.randn(m, 453, device="cuda", dtype=a_dtype)
            b = torch.randn(453, 21, device="cuda", dtype=b_dtype)
            check(config, a, b)
            if config in TRANSPOSED:
                check(config, a, b.T.contiguous().T)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
