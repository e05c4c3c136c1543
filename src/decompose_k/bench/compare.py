"""Two sets of rows compared: what became faster or slower by more than the noise within and between the runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from decompose_k.bench.rows import JSONL_NAME, Row, read_jsonl
from decompose_k.bench.summary import TIE
from decompose_k.bench.variant import BASELINES

FASTER, SAME, SLOWER = "faster", "same", "slower"
# Of the baselines' changes between two runs, this share is taken for noise: single outliers do not hide a regression.
_NOISE_QUANTILE = 0.8


@dataclass(frozen=True, slots=True)
class Change:
    """One variant of one case in both runs, and the noise that a difference must exceed."""

    before: Row
    after: Row
    noise: float

    @property
    def ratio(self) -> float:
        """Median before over median after: above 1, it became faster."""
        return self.before.p50_us / self.after.p50_us

    @property
    def verdict(self) -> str:
        """`faster` or `slower` where the medians differ by more than the noise and p20..p80 are apart, else `same`."""
        if abs(math.log(self.ratio)) <= math.log1p(self.noise):
            return SAME
        if self.after.p80_us < self.before.p20_us:
            return FASTER
        return SLOWER if self.after.p20_us > self.before.p80_us else SAME

    @property
    def is_regression(self) -> bool:
        """Whether something of ours became slower."""
        return self.after.ours and self.verdict == SLOWER


@dataclass(frozen=True, slots=True)
class Comparison:
    """What two runs have in common, what only one of them has, and by how much their baselines differ.

    `drift` is the noise between the runs; None where they share no baseline of the same torch and Triton.
    """

    changes: tuple[Change, ...]
    gone: tuple[Row, ...]
    new: tuple[Row, ...]
    drift: float | None

    @property
    def regressions(self) -> tuple[Change, ...]:
        """Ours that became slower, the worst first."""
        return tuple(sorted((one for one in self.changes if one.is_regression), key=lambda one: one.ratio))

    def count(self, verdict: str) -> int:
        """How many rows changed so."""
        return sum(one.verdict == verdict for one in self.changes)


def compare(before: Iterable[Row], after: Iterable[Row]) -> Comparison:
    """Compare two runs row by row; raises ValueError where they have no row in common.

    The noise of a row is the largest of 3 %, what two timings of one version differed by in either run, and what most
    baselines, whose code is the same in both, differ by between the runs.
    """
    first, second = _by_key(before), _by_key(after)
    common = [key for key in first if key in second]
    if not common:
        devices = sorted({row.device for row in (*first.values(), *second.values())})
        raise ValueError(f"the rows to compare must have a case, variant and device in common; got {devices}")
    drift = _drift([(first[key], second[key]) for key in common])
    changes = tuple(_change(first[key], second[key], drift) for key in common)
    gone = tuple(row for key, row in first.items() if key not in second)
    new = tuple(row for key, row in second.items() if key not in first)
    return Comparison(changes, gone, new, drift)


def read_rows(path: Path) -> tuple[Row, ...]:
    """The rows of a file, or of a folder that `bench` wrote; raises OSError or ValueError where there are none."""
    return read_jsonl(path / JSONL_NAME if path.is_dir() else path)


def _by_key(rows: Iterable[Row]) -> dict[tuple[object, ...], Row]:
    return {(*row.case, row.variant, row.static_b, row.timing): row for row in rows}


def _change(before: Row, after: Row, drift: float | None) -> Change:
    return Change(before, after, max(TIE, before.noise or 0.0, after.noise or 0.0, drift or 0.0))


def _drift(pairs: Sequence[tuple[Row, Row]]) -> float | None:
    differences = sorted(
        abs(math.log(before.p50_us / after.p50_us))
        for before, after in pairs
        if before.variant in BASELINES and (before.torch, before.triton) == (after.torch, after.triton)
    )
    if not differences:
        return None
    place = min(len(differences) - 1, math.ceil(_NOISE_QUANTILE * len(differences)) - 1)
    return math.expm1(differences[max(0, place)])
