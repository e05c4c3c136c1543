"""Any product of small sizes has torch's meaning: random shapes, dtypes, strides, epilogues and special values."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import decompose_k as dk
from decompose_k.dtypes import FLOATS
from support import ACTIVATION_NAMES, LAYOUTS, assert_as_good_as_torch, random, with_layout

ON_ANY_DEVICE = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)


def operands(shape, a_dtype, b_dtype, device, seed=0):
    m, n, k = shape
    return random((m, k), a_dtype, device, seed), random((k, n), b_dtype, device, seed + 1)


SPECIAL = st.sampled_from([0.0, -0.0, 1.0, -2.5, float("inf"), float("-inf"), float("nan"), 1e-40, -1e-45, 6e-8, 3e4])


@ON_ANY_DEVICE
@given(data=st.data())
def test_any_product(data, device):
    m, n, k = (data.draw(st.integers(0, limit), label=name) for name, limit in (("m", 9), ("n", 9), ("k", 70)))
    a_dtype, b_dtype = (data.draw(st.sampled_from(FLOATS)) for _ in range(2))
    out_dtype = data.draw(st.sampled_from((None, *FLOATS)))
    a, b = operands((m, n, k), a_dtype, b_dtype, device, seed=data.draw(st.integers(0, 1000)))
    for matrix in (a, b):
        if matrix.numel():
            for place in data.draw(st.lists(st.integers(0, matrix.numel() - 1), max_size=2)):
                matrix.view(-1)[place] = data.draw(SPECIAL)
    a, b = with_layout(a, data.draw(st.sampled_from(LAYOUTS))), with_layout(b, data.draw(st.sampled_from(LAYOUTS)))
    bias = None
    if data.draw(st.booleans()):
        bias_shape = data.draw(st.sampled_from([(), (n,), (1,), (m, n), (m, 1), (1, n)]))
        bias = random(bias_shape, data.draw(st.sampled_from(FLOATS)), device, 7)
    epilogue = {
        "bias": bias,
        "alpha": data.draw(st.sampled_from([1.0, 0.5, -2.0])),
        "beta": data.draw(st.sampled_from([1.0, 0.0, -0.5])),
        "activation": data.draw(st.sampled_from(ACTIVATION_NAMES)),
    }
    split_k = data.draw(st.one_of(st.none(), st.integers(1, max(k, 1))))
    result = dk.matmul(a, b, split_k=split_k, out_dtype=out_dtype, **epilogue)
    assert_as_good_as_torch(result, a, b, out_dtype=out_dtype, **epilogue)
