"""What the tests of remembered choices share: a problem, its configs, and files of choices written by hand."""

from __future__ import annotations

from dataclasses import replace

import torch

import decompose_k as dk
from decompose_k import cache, store
from decompose_k.entries import key_of
from decompose_k.store import Document, Header, file_name
from stub_devices import DEVICES, entry_of

PROBLEM = dk.Problem.make(16, 256, 7168, torch.bfloat16, out_dtype=torch.float32, b_layout="column")
PAIR = dk.Config("pair", split_k=16, block_k=128, num_stages=3)
SPLIT = dk.Config("bmm_sum", split_k=5)
H200 = DEVICES["H200"]
CLASS_FILE = "nvidia-h200.bf16-bf16.json"
GOOD = store.render(Document(Header.of(H200), {key_of(PROBLEM): entry_of(PROBLEM, PAIR).to_json()}))


def found(problem=PROBLEM, device=H200):
    return [(remembered.entry.config, remembered.origin) for remembered in cache.remembered(problem, device)]


def write_document(folder, device, entries, **changes):
    header = replace(Header.of(device), **changes)
    raw = {entry.key: entry.to_json() for entry in entries}
    store.write(folder / file_name(device, "bf16-bf16"), Document(header, raw))
