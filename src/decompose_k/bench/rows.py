"""One measured variant of one case is one row; rows are what is stored, and everything shown is made from them."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

JSONL_NAME = "rows.jsonl"
CSV_NAME = "rows.csv"

_NUMBERS = ("p20_us", "p50_us", "p80_us", "error", "torch_error", "bandwidth", "rate")
_MAY_BE_ZERO = ("error", "torch_error", "noise")
_COUNTS = ("m", "n", "k", "bytes", "flops", "repetitions")
_FLAGS = ("static_b", "ours")
# Measured since later: what a row of earlier records does not say.
_OPTIONAL_TIMES = ("warm_us", "weight_cold_us", "event_us", "host_us")
_OPTIONAL = (*_OPTIONAL_TIMES, "noise", "chosen")
_NULLABLE = ("activation", "config", "triton", "commit", *_OPTIONAL)


@dataclass(frozen=True, slots=True)
class Row:
    """One variant of one case, as measured.

    `variant` is its key, `label` how it is shown, `ours` whether it is Decompose-K. Times are in microseconds; `error`
    and `torch_error` are relative Frobenius errors against fp64, of this variant and of torch in the same dtypes.
    `bytes` and `flops` are the least the case needs; `bandwidth` (bytes/s) and `rate` (flop/s) are the ceilings
    measured on the device in the same run. `timing` names the method of `decompose_k.timing`.

    Further medians, where they were measured: `warm_us` with all operands in the cache, `weight_cold_us` with a in the
    cache and b in memory, `event_us` by the events around one eager call, `host_us` of the host alone. `noise` is by
    how much two timings of one version differed in this run: 0.02 is 2 %. `chosen` is what an autotuner inside chose.
    """

    suite: str
    name: str
    status: str
    m: int
    n: int
    k: int
    a_dtype: str
    b_dtype: str
    out_dtype: str
    layout: str
    activation: str | None
    static_b: bool
    variant: str
    label: str
    ours: bool
    backend: str
    config: dict[str, Any] | None
    p20_us: float
    p50_us: float
    p80_us: float
    repetitions: int
    timing: str
    error: float
    torch_error: float
    bytes: int
    flops: int
    bandwidth: float
    rate: float
    device: str
    device_type: str
    torch: str
    triton: str | None
    version: str
    commit: str | None
    date: str
    warm_us: float | None = None
    weight_cold_us: float | None = None
    event_us: float | None = None
    host_us: float | None = None
    noise: float | None = None
    chosen: str | None = None

    @property
    def case(self) -> tuple[Any, ...]:
        """What makes rows comparable: the same case on the same device."""
        return (
            self.suite,
            self.name,
            self.m,
            self.n,
            self.k,
            self.a_dtype,
            self.b_dtype,
            self.out_dtype,
            self.layout,
            self.activation,
            self.device,
        )

    @property
    def size(self) -> str:
        """`MxNxK`, as the command line takes it."""
        return f"{self.m}x{self.n}x{self.k}"

    @property
    def dtypes(self) -> str:
        """Operands and result, as `describe_dtypes` writes them."""
        return describe_dtypes(self.a_dtype, self.b_dtype, self.out_dtype)

    @property
    def roofline_us(self) -> float:
        """Least time in microseconds under the measured ceilings."""
        return max(self.bytes / self.bandwidth, self.flops / self.rate) * 1e6

    def to_json(self) -> dict[str, Any]:
        """Plain values for a JSON file; `from_json` restores an equal row."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Any) -> Row:
        """The row that `to_json` described; raises ValueError or TypeError that says what is wrong."""
        if not isinstance(values, dict):
            raise TypeError(f"a row must be a JSON object; got {type(values).__name__}")
        names = {field.name for field in fields(cls)}
        missing, unknown = sorted(names - set(values) - set(_OPTIONAL)), sorted(set(values) - names)
        if missing or unknown:
            raise ValueError(f"a row lacks {missing or 'nothing'} and has unknown fields {unknown or 'none'}")
        for name, value in values.items():
            problem = _problem_with(name, value)
            if problem:
                raise ValueError(f"{name} must be {problem}; got {value!r}")
        return cls(**values)


def describe_dtypes(a: str, b: str, out: str) -> str:
    """Operands and result, such as `bf16 × fp32 → fp32`; one name where all are the same."""
    if a == b == out:
        return a
    return f"{a} → {out}" if a == b else f"{a} × {b} → {out}"


def append_jsonl(path: Path, rows: Iterable[Row]) -> None:
    """Add rows at the end of a JSON-lines file, one object a line, in one piece."""
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(row.to_json()) + "\n" for row in rows))


def mend_jsonl(path: Path) -> bool:
    """Remove what an interruption left of a line, and the rows of its case, which are then measured anew.

    Returns whether there was anything to remove.
    """
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    if not lines or lines[-1].endswith("\n"):
        return False
    whole = lines[:-1]
    if whole:
        last = Row.from_json(json.loads(whole[-1])).case
        while whole and Row.from_json(json.loads(whole[-1])).case == last:
            whole.pop()
    path.write_text("".join(whole), encoding="utf-8")
    return True


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write rows as a table for spreadsheets; `config` is one JSON text."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)])
        writer.writeheader()
        for row in rows:
            values = row.to_json()
            values["config"] = "" if row.config is None else json.dumps(row.config)
            writer.writerow(values)


def read_jsonl(path: Path) -> tuple[Row, ...]:
    """The rows of a file; raises ValueError with the line number of the first that is no row, or if there are none."""
    rows = []
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a file of rows: {error.reason} at byte {error.start}") from None
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            rows.append(Row.from_json(json.loads(line)))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    if not rows:
        raise ValueError(f"{path} holds no rows")
    return tuple(rows)


def _problem_with(name: str, value: Any) -> str | None:
    if value is None and name in _NULLABLE:
        return None
    if name in (*_NUMBERS, *_OPTIONAL_TIMES, "noise"):
        return _number_problem(name, value)
    if name in _COUNTS:
        is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        return None if is_count else "an integer >= 0"
    if name in _FLAGS:
        return None if isinstance(value, bool) else "true or false"
    if name == "config":
        return None if isinstance(value, dict) else "an object or null"
    return None if isinstance(value, str) else "a text"


def _number_problem(name: str, value: Any) -> str | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if name in _MAY_BE_ZERO:
        return None if is_number and value >= 0 else "a finite number >= 0"
    return None if is_number and value > 0 else "a finite number > 0"
