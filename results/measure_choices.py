"""Measure the choices for the whole corpus side by side: `PYTHONPATH=src python3 results/measure_choices.py FILE`.

For every bucketed problem of the corpus (Gram matrices and weight gradients apart), with and without a static weight:
torch as one would write it by hand, the heuristic's first candidate, and what is remembered. One JSON line each. With
`--every-m` instead: routers for M from 1 to 64, buckets' ends and their middles; with `--elsewhere`: sizes that the
corpus lacks. With `--since EARLIER`, the records of that file are taken over where both choices are what they were.

The same kernel differs by some 3 % from one graph to the next; to tell one M from the next, `--every-m` pools more.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from decompose_k.accuracy import make_operands, own_product, torch_product
from decompose_k.bench.cases import SUITE_ACTIVATIONS
from decompose_k.bench.machine import Machine
from decompose_k.compiling import compile_ahead
from decompose_k.config import Config
from decompose_k.device import Device
from decompose_k.heuristics import candidates
from decompose_k.plan import plan
from decompose_k.problem import Problem
from decompose_k.shapes import corpus
from decompose_k.timing import make_input_sets, time_variants

LEFT_OUT = ("gram", "wgrad")
# (graphs, repetitions over all of them)
EFFORT, EVERY_M_EFFORT = (2, 9), (8, 32)
EVERY_M = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64)
ROUTERS = ((256, 7168), (128, 2880))
# (M, N, K) of which every combination is measured: a short K, and many rows.
SHORT = ((16, 256, 1024), (16, 64, 128, 512), (512, 1024, 2048))
TALL = ((512, 1024), (96, 160, 224, 320), (3072, 5120, 8192))


def corpus_problems() -> dict[Problem, str]:
    """Distinct bucketed problems and the suite of the first shape that makes each."""
    found: dict[Problem, str] = {}
    for shape in corpus():
        if shape.suite not in LEFT_OUT:
            for static_b in (False, True) if shape.has_static_weight else (False,):
                activation = SUITE_ACTIVATIONS.get(shape.suite)
                problem = shape.problem("cuda", activation=activation, static_b=static_b)
                found.setdefault(problem.bucketed(), shape.suite)
    return found


def router_problems() -> dict[Problem, str]:
    """Routers at the ends and in the middle of each bucket of M."""
    return {
        Problem.make(m, n, k, out_dtype=torch.float32, b_layout="column", static_b=static_b): "router"
        for n, k in ROUTERS
        for static_b in (False, True)
        for m in EVERY_M
    }


def elsewhere_problems() -> dict[Problem, str]:
    """Sizes that the corpus lacks, at which the heuristic is on its own."""
    bf16, fp32 = torch.bfloat16, torch.float32
    return {
        Problem.make(m, n, k, bf16, out_dtype=out_dtype, b_layout="column"): "elsewhere"
        for sizes, out_dtype in ((SHORT, bf16), (TALL, fp32))
        for m, n, k in itertools.product(*sizes)
    }


def choices(problem: Problem, device: Device) -> dict[str, Config]:
    """The heuristic's first candidate and what is remembered."""
    return {"first": candidates(problem.bucketed(), device)[0], "chosen": plan(problem, device).config}


def measured(
    problems: dict[Problem, str], place: torch.device, deadline: float, effort: tuple[int, int]
) -> Iterator[dict[str, object]]:
    """One record for each problem until the deadline."""
    device, machine = Device.of(place), Machine.of(place)
    for problem, suite in problems.items():
        if time.monotonic() > deadline:
            return
        configs = choices(problem, device)
        generator = torch.Generator(place).manual_seed(0)
        operands = make_input_sets(lambda p=problem, g=generator: make_operands(p, place, g), problem.bytes, place)
        calls = {"torch": torch_product(problem)[1], "first": own_product(problem, configs["first"])}
        if configs["chosen"] != configs["first"]:
            calls["chosen"] = own_product(problem, configs["chosen"])
        graphs, repetitions = effort
        timings = time_variants(
            calls,
            operands,
            place,
            bytes_per_set=problem.bytes,
            repetitions=repetitions,
            graph_calls=100,
            graphs=graphs,
        )
        medians = {name: round(timing.p50_us, 3) for name, timing in timings.items()}
        yield {
            "suite": suite,
            "problem": problem.to_json(),
            "origin": plan(problem, device).origin,
            "first": configs["first"].to_json(),
            "chosen": configs["chosen"].to_json(),
            "torch_us": medians["torch"],
            "first_us": medians["first"],
            "chosen_us": medians.get("chosen", medians["first"]),
            "device": device.name,
            "torch": torch.__version__,
            "commit": machine.commit,
            "date": machine.date,
        }


def unchanged(earlier: Path | None, problems: dict[Problem, str], device: Device) -> dict[Problem, dict[str, object]]:
    """Records of an earlier file by their problems, as far as these are asked for and the choices still the same."""
    if earlier is None:
        return {}
    records = [json.loads(line) for line in earlier.read_text(encoding="utf-8").splitlines()]
    found = {Problem.from_json(record["problem"]): record for record in records}
    return {
        problem: record
        for problem, record in found.items()
        if problem in problems
        and (record["device"], record["torch"]) == (device.name, torch.__version__)
        and choices(problem, device) == {name: Config.from_json(record[name]) for name in ("first", "chosen")}
    }


def main() -> None:
    """Compile ahead, then measure until done or out of time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--every-m", action="store_true", help="routers for M from 1 to 64 instead of the corpus")
    which.add_argument("--elsewhere", action="store_true", help="sizes that the corpus lacks instead")
    parser.add_argument("--since", type=Path, metavar="EARLIER", help="take over what did not change since")
    parser.add_argument("--seconds", type=float, default=600, help="when to stop")
    parser.add_argument("--jobs", type=int, default=16, help="processes that compile")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    place = torch.device("cuda", torch.cuda.current_device())
    device = Device.of(place)
    make = router_problems if arguments.every_m else elsewhere_problems if arguments.elsewhere else corpus_problems
    problems = make()
    effort = EVERY_M_EFFORT if arguments.every_m else EFFORT
    kept = unchanged(arguments.since, problems, device)
    changed = {problem: suite for problem, suite in problems.items() if problem not in kept}
    work = [
        (problem, config)
        for problem in changed
        for config in choices(problem, device).values()
        if config.backend == "triton"
    ]
    compile_ahead(work, place, arguments.jobs)
    with arguments.file.open("w", encoding="utf-8") as file:
        for record in (*kept.values(), *measured(changed, place, deadline, effort)):
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
