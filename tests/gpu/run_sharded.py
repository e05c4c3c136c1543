"""Run the GPU tests as several processes on one GPU: `PYTHONPATH=src python3 tests/gpu/run_sharded.py`.

The time goes into compiling kernels, one core a process, so that processes side by side help without pytest-xdist.
What follows `--` goes to pytest; by default the GPU tests and the contract. Exits with 0 only if every process did.
"""

from __future__ import annotations

import argparse
import collections
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).parent.parent
CONTRACT = ("test_contract_values.py", "test_contract_calls.py", "test_autograd.py")
SELECTION = ("-m", "gpu or contract", str(TESTS / "gpu"), *(str(TESTS / name) for name in CONTRACT))
OUTCOMES = re.compile(r"(\d+) (passed|failed|skipped|errors?|xfailed|xpassed|deselected)\b")
# pytest's exit status where a shard's share of the tests is empty.
NO_TESTS = 5


def main() -> int:
    """Start the shards, wait for all of them, and say what came of them together."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shards", type=int, default=min(15, os.cpu_count() or 1))
    parser.add_argument("--timeout", type=float, default=400, help="seconds after which what still runs has failed")
    parser.add_argument("--log", type=Path, help="file that takes the whole output of every shard")
    parser.add_argument("pytest", nargs="*", help="arguments of pytest instead of the usual selection")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"{index}.log" for index in range(arguments.shards)]
        shards = [start(index, arguments.shards, arguments.pytest, log) for index, log in enumerate(logs)]
        deadline = time.monotonic() + arguments.timeout
        codes = [finish(shard, max(0.0, deadline - time.monotonic())) for shard in shards]
        outputs = [log.read_text(errors="replace") for log in logs]
    if arguments.log is not None:
        arguments.log.write_text("\n".join(outputs))
    return report(codes, outputs)


def start(index: int, count: int, selection: list[str], log: Path) -> subprocess.Popen:
    """One pytest process over every `count`th test from the `index`th."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", "-rfEs"]
    command += ["--device", "cuda", "--shard", f"{index}/{count}", *(selection or SELECTION)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=TESTS.parent)


def finish(shard: subprocess.Popen, timeout: float) -> int | None:
    """A shard's exit status; None where it was ended for taking too long."""
    try:
        return shard.wait(timeout)
    except subprocess.TimeoutExpired:
        shard.kill()
        shard.wait()
        return None


def report(codes: list[int | None], outputs: list[str]) -> int:
    """Print failures, skips and the counts of all shards; 0 if every one passed and any test ran."""
    counts: collections.Counter[str] = collections.Counter()
    for index, (code, output) in enumerate(zip(codes, outputs, strict=True)):
        lines = output.splitlines()
        summary = lines[-1] if lines else ""
        counts.update({name.rstrip("s"): int(count) for count, name in OUTCOMES.findall(summary)})
        sys.stdout.writelines(f"{line}\n" for line in lines if line.startswith(("FAILED", "ERROR", "SKIPPED")))
        if code not in (0, NO_TESTS):
            sys.stdout.write(
                f"shard {index}: {'took too long' if code is None else f'exit status {code}'}: {summary}\n"
            )
            sys.stdout.write("\n".join(lines[-60:]) + "\n")
    counts.pop("deselected", None)
    sys.stdout.write(
        ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) + f" in {len(codes)} shards\n"
    )
    return 0 if all(code in (0, NO_TESTS) for code in codes) and counts["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
