"""A few calls of every kernel, small enough for compute-sanitizer; run as a program."""

from __future__ import annotations

from dataclasses import replace

import torch

from decompose_k.config import Config
from decompose_k.kernels.engine import triton_matmul

PAIR = Config("pair", split_k=3, block_k=64, num_stages=3, launch="wait_first", prefetch="ab")
CASES = (
    (PAIR, torch.bfloat16),
    (replace(PAIR, launch="plain", prefetch="", reducer="tile"), torch.bfloat16),
    (replace(PAIR, split_k=8, num_stages=1, launch="static_b", prefetch="a"), torch.bfloat16),
    (replace(PAIR, input_precision="tf32x3"), torch.float32),
    (Config("dot", block_n=2, block_k=512, launch="wait_first", prefetch="b"), torch.bfloat16),
)


def main() -> None:
    for config, dtype in CASES:
        m = 2 if config.kernel == "dot" else 19
        a = torch.randn(m, 453, device="cuda", dtype=dtype)
        b = torch.randn(453, 21, device="cuda", dtype=dtype)
        a[0, 0] = float("inf")
        bias = torch.randn(21, device="cuda")
        out = triton_matmul(config, a, b, bias=bias, activation="gelu", out_dtype=torch.float32)
        expected = torch.nn.functional.gelu(a[1:].double() @ b.double() + bias)
        torch.testing.assert_close(out[1:].double(), expected, rtol=1e-3, atol=1e-3)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
