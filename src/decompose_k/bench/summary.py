"""What rows say: each case against torch, wins, ties and losses by suite, and the findings in plain words."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from decompose_k.bench.suites import CROSSOVER
from decompose_k.bench.variant import AUTO, BASELINES, TORCH, TORCH_CAST
from decompose_k.timing import STREAM_COLD

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from decompose_k.bench.rows import Row

# Nearer than this is a tie, whatever the percentiles say.
TIE = 0.03
# A quiet machine stays far below this ratio of the 80th to the 20th percentile.
NOISY = 1.5
VERDICTS = ("win", "tie", "loss")
# In place of one baseline's name: the fastest of all that were measured in the same way.
FASTEST = "fastest"


@dataclass(frozen=True, slots=True)
class Duel:
    """One case: ours against one baseline."""

    ours: Row
    baseline: Row

    @property
    def speedup(self) -> float:
        """Ratio of the medians: above 1, ours is faster."""
        return self.baseline.p50_us / self.ours.p50_us

    @property
    def medians_differ(self) -> bool:
        """Whether the medians differ by more than the noise."""
        noise = max(TIE, self.ours.noise or 0.0, self.baseline.noise or 0.0)
        return abs(math.log(self.speedup)) > math.log1p(noise)

    @property
    def verdict(self) -> str:
        """`win` or `loss` where the medians differ by more than the noise and p20..p80 do not overlap, else `tie`.

        The noise is what two timings of one version differed by in the run, but at least 3 %.
        """
        if not self.medians_differ:
            return "tie"
        if self.ours.p80_us < self.baseline.p20_us:
            return "win"
        return "loss" if self.ours.p20_us > self.baseline.p80_us else "tie"

    @property
    def title(self) -> str:
        """Name and size of the case, the size not twice."""
        return self.ours.size if self.ours.name == self.ours.size else f"{self.ours.name} {self.ours.size}"


@dataclass(frozen=True, slots=True)
class Tally:
    """Duels of one suite in one set of dtypes."""

    suite: str
    dtypes: str
    duels: tuple[Duel, ...]

    def count(self, verdict: str) -> int:
        """How many duels ended so."""
        return sum(duel.verdict == verdict for duel in self.duels)

    @property
    def losses(self) -> tuple[Duel, ...]:
        """The lost duels, the worst first."""
        return tuple(sorted((duel for duel in self.duels if duel.verdict == "loss"), key=lambda duel: duel.speedup))

    @property
    def speedups(self) -> tuple[float, ...]:
        """Every ratio, sorted."""
        return tuple(sorted(duel.speedup for duel in self.duels))

    @property
    def median(self) -> float:
        """Median ratio."""
        return statistics.median(self.speedups)


def group_cases(rows: Iterable[Row]) -> list[list[Row]]:
    """Rows of each case together; of a case measured twice the later rows stand."""
    cases: dict[tuple[object, ...], dict[str, Row]] = {}
    for row in rows:
        cases.setdefault(row.case, {})[row.variant] = row
    return [list(variants.values()) for variants in cases.values()]


def fastest_of_ours(case: Sequence[Row]) -> Row | None:
    """The variant of ours with the lowest median that needs no promise of a static weight; None without one."""
    return min((row for row in case if row.ours and not row.static_b), key=lambda row: row.p50_us, default=None)


def fastest_baseline(case: Sequence[Row]) -> Row | None:
    """The baseline with the lowest median whose time, like ours, has no share of the host's; None without one."""
    alike = (row for row in case if row.variant in BASELINES and row.timing != STREAM_COLD)
    return min(alike, key=lambda row: row.p50_us, default=None)


def variant_of(case: Sequence[Row], name: str) -> Row | None:
    """The row of a variant; None where it was not measured."""
    return next((row for row in case if row.variant == name), None)


def duels(rows: Iterable[Row], baseline: str = TORCH, ours: str | None = None) -> list[Duel]:
    """Every case that has both the baseline (or any, for `FASTEST`) and ours: the named variant, or what callers get.

    That is `auto`, or the fastest of ours where that was not measured.
    """
    found = []
    for case in group_cases(rows):
        mine = variant_of(case, ours or AUTO) or (fastest_of_ours(case) if ours is None else None)
        theirs = fastest_baseline(case) if baseline == FASTEST else variant_of(case, baseline)
        if mine is not None and theirs is not None:
            found.append(Duel(mine, theirs))
    return found


def tallies(all_duels: Iterable[Duel]) -> list[Tally]:
    """Duels by suite and dtypes, in order of appearance."""
    groups: dict[tuple[str, str], list[Duel]] = {}
    for duel in all_duels:
        groups.setdefault((duel.ours.suite, duel.ours.dtypes), []).append(duel)
    return [Tally(suite, dtypes, tuple(members)) for (suite, dtypes), members in groups.items()]


def findings(rows: Sequence[Row]) -> list[str]:
    """Sentences for a reader who sees nothing else: where Decompose-K wins, where not, and against what."""
    against_torch = duels(rows)
    if not against_torch:
        return ["No case has both torch and Decompose-K, so there is nothing to compare."]
    sentences = [advice(duels(rows, FASTEST)), _overall(against_torch, "torch.mm")]
    against_copies = duels(rows, TORCH_CAST)
    if against_copies:
        opponent = "torch.mm of fp32 copies (what torch does best with halves where a CPU has no instructions for them)"
        sentences.append(_overall(against_copies, opponent))
    if any(row.variant in BASELINES and row.variant not in (TORCH, TORCH_CAST) for row in rows):
        opponent = "the fastest alternative of each case, torch.compile and the custom-op flow among them"
        sentences.append(_overall(duels(rows, FASTEST), opponent))
    chose_torch = sum((duel.ours.config or {}).get("kernel") == "mm" for duel in against_torch)
    if chose_torch:
        sentences.append(f"In {chose_torch} of {len(against_torch)} cases Decompose-K took torch.mm itself.")
    if is_noisy(rows):
        sentences.append(
            "The machine was busy while this was measured: for a quarter of the variants the 80th percentile is over"
            f" {NOISY} times the 20th, so these ratios are rough. Measure again when it is quiet."
        )
    return sentences


def is_noisy(rows: Sequence[Row]) -> bool:
    """Whether the samples of a quarter of the rows spread so wide that their medians say little."""
    return sum(row.p80_us > NOISY * row.p20_us for row in rows) > len(rows) / 4


def losses_sentence(all_duels: Sequence[Duel], limit: int = 6) -> str:
    """The lost cases by name, the worst first."""
    lost = sorted((duel for duel in all_duels if duel.verdict == "loss"), key=lambda duel: duel.speedup)
    if not lost:
        return "No case was lost."
    named = "; ".join(f"{duel.title} {times(duel.speedup)}" for duel in lost[:limit])
    more = f"; and {len(lost) - limit} more, in the table" if len(lost) > limit else ""
    return f"Lost: {named}{more}."


def advice(all_duels: Sequence[Duel]) -> str:
    """For which suites and dtypes it pays on this machine."""
    pays, even, costs = [], [], []
    for tally in tallies(duel for duel in all_duels if duel.ours.suite != CROSSOVER):
        name = f"{tally.suite} ({tally.dtypes})"
        if tally.count("loss") > tally.count("win"):
            costs.append(name)
        elif tally.count("win") > len(tally.duels) / 2:
            pays.append(name)
        else:
            even.append(name)
    parts = []
    if pays:
        parts.append(f"use Decompose-K for {', '.join(pays)}")
    if even:
        parts.append(f"expect little from it for {', '.join(even)}")
    if costs:
        parts.append(f"stay with torch for {', '.join(costs)}")
    return f"On this machine: {'; '.join(parts)}." if parts else "Only a sweep was measured, no suite of real shapes."


def times(ratio: float) -> str:
    """A ratio as it is shown: 1.85×, 12.3×."""
    return f"{ratio:.1f}×" if ratio >= 9.95 else f"{ratio:.2f}×"


def duration(microseconds: float) -> str:
    """A time with three digits and its unit."""
    for limit, scale, unit in ((1e3, 1.0, "µs"), (1e6, 1e3, "ms"), (math.inf, 1e6, "s")):
        if microseconds < 0.9995 * limit:
            return f"{_three_digits(microseconds / scale)} {unit}"
    raise ValueError(f"microseconds must be a finite number; got {microseconds}")


def per_second(rate: float, unit: str) -> str:
    """A rate with three digits, such as 82.5 Gflop/s."""
    for scale, prefix in ((1e12, "T"), (1e9, "G")):
        if rate >= scale:
            return f"{_three_digits(rate / scale)} {prefix}{unit}/s"
    return f"{_three_digits(rate / 1e6)} M{unit}/s"


def geometric_mean(values: Sequence[float]) -> float:
    """exp of the mean logarithm."""
    return math.exp(statistics.fmean(math.log(value) for value in values))


def distinct(rows: Iterable[Row], of: Callable[[Row], str | None]) -> list[str]:
    """Different values of a field, in order of appearance."""
    return list(dict.fromkeys(value for row in rows if (value := of(row)) is not None))


def _overall(all_duels: Sequence[Duel], opponent: str) -> str:
    speedups = sorted(duel.speedup for duel in all_duels)
    counts = counts_in_words(all_duels)
    return (
        f"Against {opponent}, Decompose-K {counts} of {len(all_duels)}:"
        f" {_range(speedups)}, geometric mean {times(geometric_mean(speedups))}."
        f" {losses_sentence(all_duels)}"
    )


def counts_in_words(all_duels: Sequence[Duel]) -> str:
    """How many were won, even and lost."""
    won, tied, lost = (sum(duel.verdict == verdict for duel in all_duels) for verdict in VERDICTS)
    return f"wins {won}, ties {tied} and loses {lost}"


def _range(speedups: Sequence[float]) -> str:
    low, middle, high = speedups[0], statistics.median(speedups), speedups[-1]
    return f"speed-up {times(low)} / {times(middle)} / {times(high)} (min / median / max)"


def _three_digits(value: float) -> str:
    decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{decimals}f}"
