"""The corpus of real products with a small output and a long K: routers, LoRA, mHC, Gram matrices, the seed grid."""

from __future__ import annotations

import csv
import functools
import importlib.resources
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from decompose_k.dtypes import dtype_from_name
from decompose_k.problem import Problem

if TYPE_CHECKING:
    import torch

SUITES = ("seed", "router", "lora", "mhc", "gate", "indexer", "head", "wgrad", "gram")
ALL = "all"
OPERAND_LAYOUTS = {"NN": ("row", "row"), "NT": ("row", "column"), "TN": ("column", "row"), "TT": ("column", "column")}
# In these jobs b is a layer's weight at inference: nothing in the stream writes it.
STATIC_WEIGHT_SUITES = frozenset({"router", "lora", "mhc", "gate", "indexer", "head"})


@dataclass(frozen=True, slots=True)
class Shape:
    """One product of the corpus, a [m, k] @ b [k, n].

    `layout` is BLAS's: `NT` stores b as [n, k] (an nn.Linear weight), `TN` stores a as [k, m]. `status` says where the
    shape comes from: `definition`, `config` (a published model file), `seen` (in code) or `unverified`.
    """

    name: str
    suite: str
    m: int
    n: int
    k: int
    a_dtype: torch.dtype
    b_dtype: torch.dtype
    out_dtype: torch.dtype
    layout: str
    status: str

    @property
    def is_verified(self) -> bool:
        """Whether the shape was read from a definition, a published model file or code."""
        return self.status != "unverified"

    @property
    def has_static_weight(self) -> bool:
        """Whether b is an inference weight, so that `static_b=True` may be promised."""
        return self.suite in STATIC_WEIGHT_SUITES

    @property
    def is_gram(self) -> bool:
        """Whether both operands are one matrix: x.T @ x."""
        return self.suite == "gram"

    def problem(self, device_type: str, *, activation: str | None = None, static_b: bool = False) -> Problem:
        """The problem that this shape is on a device type."""
        a_layout, b_layout = OPERAND_LAYOUTS[self.layout]
        return Problem.make(
            self.m,
            self.n,
            self.k,
            self.a_dtype,
            b_dtype=self.b_dtype,
            out_dtype=self.out_dtype,
            a_layout=a_layout,
            b_layout=b_layout,
            activation=activation,
            static_b=static_b,
            device_type=device_type,
        )


@functools.lru_cache(maxsize=1)
def corpus() -> tuple[Shape, ...]:
    """Every shape of the corpus, one for each M, in the order of the file."""
    file = importlib.resources.files("decompose_k").joinpath("data/shapes.csv")
    lines = file.read_text(encoding="utf-8").splitlines()
    return tuple(shape for record in csv.DictReader(lines) for shape in _shapes_of(record))


def suite(name: str) -> tuple[Shape, ...]:
    """The shapes of one suite, or of all; raises ValueError for an unknown name.

    >>> len(suite("seed"))
    29
    """
    if name == ALL:
        return corpus()
    if name not in SUITES:
        raise ValueError(f"suite must be one of {', '.join((*SUITES, ALL))}; got {name!r}")
    return tuple(shape for shape in corpus() if shape.suite == name)


def parse_size(text: str) -> tuple[int, int, int]:
    """(m, n, k) of a text such as `16x256x7168`; raises ValueError for anything else.

    >>> parse_size("16x256x7168")
    (16, 256, 7168)
    """
    match = re.fullmatch(r"(\d+)x(\d+)x(\d+)", text.strip().lower())
    if match is None:
        raise ValueError(f"shape must be written MxNxK with integers >= 0, such as 16x256x7168; got {text!r}")
    m, n, k = (int(size) for size in match.groups())
    return m, n, k


def _shapes_of(record: dict[str, str]) -> list[Shape]:
    return [
        Shape(
            name=record["name"],
            suite=record["job"],
            m=int(m),
            n=int(record["n"]),
            k=int(record["k"]),
            a_dtype=dtype_from_name(record["x_dtype"]),
            b_dtype=dtype_from_name(record["w_dtype"]),
            out_dtype=dtype_from_name(record["out_dtype"]),
            layout=record["layout"],
            status=record["status"],
        )
        for m in record["m"].split(";")
    ]
