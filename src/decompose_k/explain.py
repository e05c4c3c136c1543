"""Why a problem runs as it does: the plan with the numbers behind it, and what else could run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from decompose_k import cache
from decompose_k.costs import predict_microseconds
from decompose_k.dtypes import dtype_name
from decompose_k.plan import Plan, describe, plan, workspace_bytes

if TYPE_CHECKING:
    import torch

    from decompose_k.config import Config
    from decompose_k.device import Device
    from decompose_k.problem import Problem


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run a problem: microseconds as the heuristic predicts them and as they were measured, where known.

    The prediction is a model of H200 kernels, meant for ranking. `config` is None for torch as written by hand.
    """

    label: str
    config: Config | None
    predicted_us: float | None
    measured_us: float | None

    def to_json(self) -> dict[str, Any]:
        """Plain values for a JSON file."""
        config = None if self.config is None else self.config.to_json()
        return {
            "label": self.label,
            "config": config,
            "predicted_us": self.predicted_us,
            "measured_us": self.measured_us,
        }


@dataclass(frozen=True, slots=True)
class Explanation:
    """A plan with the numbers behind it; `str()` is for reading, `to_json` for files.

    `roofline_seconds` is the least time to move the operands and the result, None where the bandwidth is not known.
    `waves` is how often the programs of the first stage fill the device, None where torch's own kernel decides that.
    `candidates` begin with the choice.
    """

    plan: Plan
    bytes: int
    flops: int
    roofline_seconds: float | None
    waves: float | None
    workspace_bytes: int
    candidates: tuple[Candidate, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values for a JSON file."""
        return {
            "problem": self.plan.problem.to_json(),
            "device": self.plan.device.to_json(),
            "config": self.plan.config.to_json(),
            "origin": self.plan.origin,
            "reason": self.plan.reason,
            "alternatives": [config.to_json() for config in self.plan.alternatives],
            "candidates": [candidate.to_json() for candidate in self.candidates],
            "bytes": self.bytes,
            "flops": self.flops,
            "roofline_seconds": self.roofline_seconds,
            "waves": self.waves,
            "workspace_bytes": self.workspace_bytes,
        }

    def __str__(self) -> str:
        problem = self.plan.problem
        roofline = "unknown bandwidth" if self.roofline_seconds is None else f"{self.roofline_seconds * 1e6:.2f} us"
        waves = "left to torch" if self.waves is None else f"{self.waves:.2f}"
        lines = [
            f"problem       {describe(problem)} -> {dtype_name(problem.out_dtype)}",
            f"chosen for    m = {problem.bucketed().m}" + (", as every m" if problem.batch_invariant else ""),
            f"device        {self.plan.device.name}, {self.plan.device.multiprocessors} multiprocessors",
            f"roofline      {roofline} ({self.bytes} bytes, {self.flops} flop)",
            f"choice        {self.plan.config}",
            f"from          {self.plan.origin}",
            f"reason        {self.plan.reason}",
            f"waves         {waves}",
            f"workspace     {self.workspace_bytes} bytes",
        ]
        width = max(len(candidate.label) for candidate in self.candidates)
        lines.append(f"{'candidates':{width + 2}}{'predicted':>12}{'measured':>12}")
        lines += [
            f"  {candidate.label:{width}}{_duration(candidate.predicted_us):>12}{_duration(candidate.measured_us):>12}"
            for candidate in self.candidates
        ]
        return "\n".join(lines)


def explain(problem: Problem, device: Device | torch.device | str | None = None) -> Explanation:
    """The plan of a problem with its roofline, waves, workspace, and its candidates' predicted and measured times.

    Args:
        problem: what is computed.
        device: as for `plan`.

    Raises:
        TypeError, ValueError: a wrong argument.

    >>> from decompose_k.problem import Problem
    >>> explain(Problem.make(16, 16, 8192, device_type="cpu")).bytes
    524800
    """
    chosen = plan(problem, device)
    bandwidth = chosen.device.bandwidth
    return Explanation(
        plan=chosen,
        bytes=problem.bytes,
        flops=problem.flops,
        roofline_seconds=problem.roofline_seconds(bandwidth, math.inf) if bandwidth > 0 else None,
        waves=_waves(chosen.config, problem, chosen.device),
        workspace_bytes=workspace_bytes(chosen.config, problem),
        candidates=_candidates(chosen),
    )


def _candidates(chosen: Plan) -> tuple[Candidate, ...]:
    """The choice, what was measured (fastest first), and what else the heuristic would try (best guess first)."""
    bucket, device = chosen.problem.bucketed(), chosen.device
    entry = next((found.entry for found in cache.remembered(bucket, device)), None)
    measured = () if entry is None else entry.timings
    by_hand = [one for one in measured if one.config is None]
    configs = dict.fromkeys(
        (chosen.config, *(one.config for one in measured if one.config is not None), *chosen.alternatives)
    )
    found = [
        Candidate(
            str(config),
            config,
            _prediction(config, bucket, device),
            None if entry is None else entry.microseconds_of(config),
        )
        for config in configs
    ]
    return (*found, *(Candidate(one.label, None, None, one.timing.p50_us) for one in by_hand))


def _prediction(config: Config, problem: Problem, device: Device) -> float | None:
    """The heuristic's microseconds; None where it has no model, as on a CPU and of torch's split form."""
    is_modelled = device.type == "cuda" and config.kernel != "bmm_sum" and problem.is_float
    if not is_modelled or 0 in (problem.m, problem.n, problem.k):
        return None
    return predict_microseconds(config, problem, device)


def _waves(config: Config, problem: Problem, device: Device) -> float | None:
    if config.kernel == "mm":
        return None
    if config.kernel == "bmm_sum":
        return config.split_k / device.multiprocessors
    tiles = math.ceil(problem.m / config.block_m) * math.ceil(problem.n / config.block_n)
    return tiles * config.split_k / device.multiprocessors


def _duration(microseconds: float | None) -> str:
    return "-" if microseconds is None else f"{microseconds:.2f} us"
