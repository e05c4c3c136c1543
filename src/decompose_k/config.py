"""How a problem is computed: the frozen choice that a plan makes, a tuner stores and a launcher obeys."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

TORCH_KERNELS = ("mm", "bmm_sum")
TRITON_KERNELS = ("pair", "dot")
KERNELS = TORCH_KERNELS + TRITON_KERNELS
REDUCERS = ("flat", "tile")
LAUNCHES = ("plain", "wait_first", "static_b")
INPUT_PRECISIONS = ("ieee", "tf32x3", "tf32")
# Splits that one load of the flat reducer covers; more are summed in a loop of such blocks.
MOST_SPLITS_AT_ONCE = 128
# Shared memory is reserved in steps of this.
RESERVE_STEP_KIB = 36
PREFETCHES = ("", "a", "b", "ab")


@dataclass(frozen=True, slots=True)
class Config:
    """One way to compute a product.

    `kernel` is `mm` (torch's own), `bmm_sum` (torch, K cut in `split_k` chunks), `pair` (Triton: partial product, then
    reducer) or `dot` (Triton: one launch without tensor cores, for few rows). The block fields speak of the Triton
    kernels alone. `launch` says how they are launched: `plain`, or with programmatic dependent launch as `wait_first`
    (always safe) or `static_b` (b is read before the wait, which needs the caller's promise). `prefetch` names the
    operands that are fetched into L2 before the wait, which is always safe, and `prefetch_blocks` how many of a
    program's K blocks are (0: all). `reserve_kib` is the shared memory that a program of stage 1 takes at least, in
    steps of 36 KiB, so that only so many share a multiprocessor.
    """

    kernel: str
    split_k: int = 1
    block_m: int = 16
    block_n: int = 16
    block_k: int = 64
    group_m: int = 8
    num_warps: int = 4
    num_stages: int = 1
    reducer: str = "flat"
    reduce_block: int = 32
    reduce_warps: int = 1
    launch: str = "plain"
    prefetch: str = ""
    prefetch_blocks: int = 0
    reserve_kib: int = 0
    input_precision: str = "ieee"

    def __post_init__(self) -> None:
        for name, allowed in (
            ("kernel", KERNELS),
            ("reducer", REDUCERS),
            ("launch", LAUNCHES),
            ("prefetch", PREFETCHES),
            ("input_precision", INPUT_PRECISIONS),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {getattr(self, name)!r}")
        for name in ("split_k", "group_m", "num_stages"):
            _check_positive(name, getattr(self, name))
        if not _is_count(self.prefetch_blocks, 0):
            raise ValueError(f"prefetch_blocks must be an integer >= 0; got {self.prefetch_blocks!r}")
        if not _is_count(self.reserve_kib, 0) or self.reserve_kib % RESERVE_STEP_KIB:
            raise ValueError(f"reserve_kib must be 0 or a multiple of {RESERVE_STEP_KIB}; got {self.reserve_kib!r}")
        for name in ("block_m", "block_n", "block_k", "num_warps", "reduce_block", "reduce_warps"):
            value = getattr(self, name)
            _check_positive(name, value)
            if value & (value - 1):
                raise ValueError(f"{name} must be a power of two; got {value}")

    @property
    def backend(self) -> str:
        """`torch` or `triton`: which engine runs this config."""
        return "torch" if self.kernel in TORCH_KERNELS else "triton"

    def to_json(self) -> dict[str, Any]:
        """Plain values for a JSON file; `from_json` restores an equal config."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Config:
        """The config that `to_json` described; raises ValueError for unknown names or bad values."""
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f"config has unknown fields {', '.join(unknown)}; allowed: {', '.join(sorted(known))}")
        return cls(**values)

    def __str__(self) -> str:
        if self.kernel == "mm":
            return "torch.mm"
        if self.kernel == "bmm_sum":
            return f"torch bmm+sum split_k={self.split_k}"
        tile = f"{self.block_m}x{self.block_n}x{self.block_k}"
        reserve = f" reserve={self.reserve_kib}K" if self.reserve_kib else ""
        blocks = f":{self.prefetch_blocks}" if self.prefetch_blocks else ""
        prefetch = f" prefetch={self.prefetch}{blocks}" if self.prefetch else ""
        how = f"{self.launch}{prefetch}{reserve}"
        return f"triton {self.kernel} split_k={self.split_k} tile={tile} warps={self.num_warps} {how}"


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _check_positive(name: str, value: object) -> None:
    if not _is_count(value, 1):
        raise ValueError(f"{name} must be an integer >= 1; got {value!r}")
