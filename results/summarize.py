"""Write the README's table of results from the rows: `python results/summarize.py`; with `--check`, only compare."""

from __future__ import annotations

import json
import math
import sys
from collections import defaultdict
from pathlib import Path

RESULTS = Path(__file__).parent
README = RESULTS.parent / "README.md"
BEGIN, END = "<!-- results:begin -->\n", "<!-- results:end -->"
TITLES = {
    "seed-bf16": "bf16, fused ReLU, M = N in 16..64, K in 8192..32768",
    "seed-bf16-pooled": "the same, M and N up to 48 (three graphs pooled)",
    "seed-fp16-pooled": "fp16, fused ReLU (three graphs pooled, K up to 12288 at 64)",
    "seed-fp32": "fp32 as accurate as torch's or better",
    "router-pooled": "MoE routers [M, 7168] x 256 and [M, 2880] x 128, bf16 in, fp32 out, M in 1..64",
    "mixed": "bf16 x fp32 weight: router [M, 3072] x 256, mHC [M, 28672] x 24, M in 1, 16, 64",
}
VARIANTS = {"auto": "default", "static": "static weight"}


def speedups(file: Path) -> dict[str, list[float]]:
    """torch's median time over ours, for each of our variants."""
    cases: dict[tuple[object, ...], dict[str, float]] = defaultdict(dict)
    for line in file.read_text().splitlines():
        row = json.loads(line)
        cases[tuple(row[key] for key in ("name", "m", "n", "k", "a_dtype"))][row["variant"]] = row["p50_us"]
    found: dict[str, list[float]] = defaultdict(list)
    for times in cases.values():
        for variant in VARIANTS:
            if variant in times:
                found[variant].append(times["torch"] / times[variant])
    return found


def table() -> str:
    """One line for each file of rows and variant: how many shapes, and the least, mean and greatest speed-up."""
    lines = [
        "| H200, against torch.mm | launch | shapes | min | geometric mean | max |",
        "|---|---|---|---|---|---|",
    ]
    for name, title in TITLES.items():
        for variant, ratios in speedups(RESULTS / "h200" / f"{name}.jsonl").items():
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            numbers = f"{min(ratios):.2f} | {mean:.2f} | {max(ratios):.2f}"
            lines.append(f"| {title} | {VARIANTS[variant]} | {len(ratios)} | {numbers} |")
    note = (
        "Rows: [results/h200](results/h200). Every variant ran with the best of its candidate configs, found by"
        " measuring (`decompose-k bench --search`); operands come from device memory. What `auto` chooses without a"
        " search was not measured in these runs and can be slower."
    )
    return "\n".join([*lines, "", note, ""])


def main() -> int:
    """Rewrite the table, or with `--check` say whether it is what the rows give."""
    text = README.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    wanted = before + BEGIN + table() + END + after
    if "--check" in sys.argv[1:]:
        return int(text != wanted)
    README.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
