"""Remembered choices: what they are remembered under, whose count, and how they are shipped, exported and installed."""

from __future__ import annotations

import json
import warnings
from dataclasses import fields, replace

import pytest
import torch

import decompose_k as dk
from cache_for_tests import CLASS_FILE, GOOD, H200, PAIR, PROBLEM, SPLIT, found, write_document
from decompose_k import cache, store
from decompose_k.entries import Entry, Measured, key_of
from decompose_k.store import UnreadableFileError, file_name
from decompose_k.timing import Timing
from stub_devices import CPU, DEVICES, entry_of

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


# Another value of every field of PROBLEM, beside those fields that it needs to be valid.
OTHER_FIELDS = {
    "m": {"m": 17},
    "n": {"n": 255},
    "k": {"k": 7169},
    "a_dtype": {"a_dtype": FP16},
    "b_dtype": {"b_dtype": FP16},
    "out_dtype": {"out_dtype": BF16},
    "bias_dtype": {"bias_dtype": BF16},
    "a_layout": {"a_layout": "column"},
    "b_layout": {"b_layout": "row"},
    "activation": {"activation": "relu"},
    "precision": {"b_dtype": FP32, "precision": "tf32"},
    "batch_invariant": {"batch_invariant": True},
    "static_b": {"static_b": True},
    "device_type": {"device_type": "cpu"},
}


def test_the_key_has_every_field_of_a_problem():
    assert set(OTHER_FIELDS) == {field.name for field in fields(dk.Problem)}


@pytest.mark.parametrize("changes", OTHER_FIELDS.values(), ids=OTHER_FIELDS)
def test_what_a_choice_depends_on_changes_the_key(changes):
    assert key_of(replace(PROBLEM, **changes)) != key_of(PROBLEM)


def test_precisions_have_keys_of_their_own():
    mixed = replace(PROBLEM, b_dtype=FP32, precision="highest")
    keys = {key_of(replace(mixed, precision=name)) for name in ("highest", "ieee", "tf32x3", "tf32")}
    assert len(keys) == 4


def test_what_a_choice_does_not_depend_on_leaves_the_key():
    assert {key_of(replace(PROBLEM, m=m)) for m in range(33, 65)} == {key_of(replace(PROBLEM, m=64))}
    invariant = replace(PROBLEM, batch_invariant=True)
    assert len({key_of(replace(invariant, m=m)) for m in (1, 2, 16, 100, 5000)}) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "NVIDIA H200 NVL"},
        {"capability": (9, 1)},
        {"multiprocessors": 66},
        {"vendor": "amd"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_another_device_does_not_see_a_choice(folder, changes):
    write_document(folder, H200, [entry_of(PROBLEM, PAIR)])
    other = replace(H200, **changes)
    if other.name != H200.name:
        (folder / CLASS_FILE).rename(folder / file_name(other, "bf16-bf16"))
    assert found(device=other) == []


@pytest.mark.parametrize(
    "changes", [{"kernel": "0"}, {"torch": "2.11.0"}, {"triton": None}, {"triton": "3.6.0"}], ids=str
)
def test_choices_of_other_versions_are_a_silent_miss(folder, changes):
    write_document(folder, H200, [entry_of(PROBLEM, PAIR)], **changes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert found() == []


def test_what_drivers_round_does_not_matter(folder):
    write_document(folder, H200, [entry_of(PROBLEM, PAIR)])
    assert found(device=replace(H200, bandwidth=4.7e12, l2_bytes=50 << 20)) == [(PAIR, "tuned")]


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_an_entry_is_found_where_it_was_remembered_and_nowhere_else(folder, device):
    config = dk.Config("pair", split_k=8)
    assert cache.remember([entry_of(PROBLEM, config)], device)
    assert [path.name for path in store.choice_files(folder)] == [file_name(device, "bf16-bf16")]
    for other in DEVICES.values():
        assert found(device=other) == ([(config, "tuned")] if other == device else [])
        assert len(cache.user_entries(other)) == (other == device)


def test_an_entry_survives_its_file():
    entry = entry_of(PROBLEM, PAIR, others=[(dk.Config("mm"), 9.0), (replace(PAIR, launch="wait_first"), 1.5)])
    assert Entry.from_json(json.loads(json.dumps(entry.to_json()))) == entry
    assert (entry.chosen_us, entry.torch_us, entry.speedup) == (2.0, 7.0, 3.5)
    assert entry.microseconds_of(dk.Config("mm")) == 9.0
    assert entry.microseconds_of(SPLIT) is None


def test_classes_of_problems_have_files_of_their_own(folder):
    other = dk.Problem.make(16, 256, 7168, FP32)
    assert cache.remember([entry_of(PROBLEM, PAIR), entry_of(other, PAIR)], H200)
    assert [path.name for path in store.choice_files(folder)] == [CLASS_FILE, "nvidia-h200.fp32-fp32.json"]
    assert {entry.problem for entry in cache.user_entries(H200)} == {PROBLEM, other}


def test_a_file_is_readable_and_in_order(folder):
    problems = [replace(PROBLEM, n=n) for n in (300, 100, 200)]
    cache.remember([entry_of(problem, PAIR) for problem in problems], H200)
    text = (folder / CLASS_FILE).read_text()
    values = json.loads(text)
    assert list(values["entries"]) == sorted(key_of(problem) for problem in problems)
    assert (values["format"], values["torch"], values["device"]["name"]) == (1, torch.__version__, "NVIDIA H200")
    # A line for each timing, so that a change of one shows as one.
    assert sum('"p50_us"' in line for line in text.splitlines()) == 6


def test_a_later_choice_replaces_an_earlier_one(folder):
    cache.remember([entry_of(PROBLEM, PAIR)], H200)
    assert found() == [(PAIR, "tuned")]
    cache.remember([entry_of(PROBLEM, SPLIT)], H200)
    assert found() == [(SPLIT, "tuned")]


def test_files_are_read_once_and_again_when_told(folder, monkeypatch):
    read, paths = store.read, []
    monkeypatch.setattr(store, "read", lambda path: paths.append(path.name) or read(path))
    cache.remember([entry_of(PROBLEM, PAIR)], H200)
    paths.clear()
    for m in (33, 34, 35, 36):
        dk.plan(replace(PROBLEM, m=m), H200)
    assert sorted(paths) == [CLASS_FILE, CLASS_FILE]
    write_document(folder, H200, [entry_of(PROBLEM, SPLIT)])
    assert found() == [(PAIR, "tuned")]
    cache.forget()
    assert found() == [(SPLIT, "tuned")]


def test_a_shipped_choice_counts_whatever_torch_and_triton(folder, shipped):
    write_document(shipped, H200, [entry_of(PROBLEM, PAIR)], torch="2.11.0", triton="3.6.0")
    assert found() == [(PAIR, "shipped")]
    # A part of the same device, as a driver may present it, runs the same kernels.
    assert found(device=replace(H200, multiprocessors=66)) == [(PAIR, "shipped")]
    cache.remember([entry_of(PROBLEM, SPLIT)], H200)
    assert found() == [(SPLIT, "tuned"), (PAIR, "shipped")]


def test_a_shipped_choice_of_other_kernels_or_another_device_does_not_count(shipped):
    write_document(shipped, H200, [entry_of(PROBLEM, PAIR)], kernel="0")
    assert found() == []
    write_document(shipped, H200, [entry_of(PROBLEM, PAIR)])
    cache.forget()
    assert found() == [(PAIR, "shipped")]
    (shipped / CLASS_FILE).rename(shipped / file_name(DEVICES["H100"], "bf16-bf16"))
    cache.forget()
    assert found(device=DEVICES["H100"]) == []


def test_a_broken_shipped_file_is_a_miss(shipped):
    shipped.mkdir()
    (shipped / CLASS_FILE).write_text("{")
    with pytest.warns(UserWarning, match="cannot be read"):
        assert found() == []


@pytest.mark.parametrize("most", [1, 2, 9])
def test_an_export_may_leave_out_slow_timings(shipped, most):
    timings = tuple(
        Measured(str(config), Timing(us, us, us, 3, "graph-cold"), config)
        for config, us in ((PAIR, 2.0), (SPLIT, 5.0), (dk.Config("mm"), 4.0), (None, 7.0))
    )
    cache.remember([Entry(PROBLEM, PAIR, timings, "2026-01-02T03:04:05+00:00")], H200)
    cache.export(shipped, H200, most_timings=most)
    cache.clear(H200)
    (entry,) = (found.entry for found in cache.remembered(PROBLEM, H200))
    kept = [one for one in timings if one.timing.p50_us <= {1: 2.0, 2: 4.0, 9: 9.0}[most] or one.config is None]
    assert entry.timings == tuple(kept)
    assert (entry.config, entry.torch_us) == (PAIR, 7.0)


def test_what_is_exported_can_be_shipped_and_installed(folder, shipped, tmp_path):
    others = dk.Problem.make(4, 4, 4096, FP32)
    cache.remember([entry_of(PROBLEM, PAIR), entry_of(others, SPLIT)], H200)
    cache.remember([entry_of(PROBLEM, SPLIT)], DEVICES["A100"])
    written = cache.export(shipped, H200)
    assert {path.name for path in written} == {CLASS_FILE, "nvidia-h200.fp32-fp32.json"}
    assert (shipped / CLASS_FILE).read_text() == (folder / CLASS_FILE).read_text()
    assert len(cache.clear(H200)) == 2
    assert found() == [(PAIR, "shipped")]
    assert found(device=DEVICES["A100"]) == [(SPLIT, "tuned")]
    for path in written:
        cache.install(path)
    assert found() == [(PAIR, "tuned"), (PAIR, "shipped")]
    assert found(others) == [(SPLIT, "tuned"), (SPLIT, "shipped")]


def test_installing_adds_to_what_is_there(folder, tmp_path):
    write_document(tmp_path, H200, [entry_of(PROBLEM, PAIR)])
    cache.remember([entry_of(replace(PROBLEM, n=8), SPLIT)], H200)
    installed = cache.install(tmp_path / CLASS_FILE)
    assert [entry.problem for entry in installed] == [PROBLEM]
    assert len(cache.user_entries(H200)) == 2


def test_what_other_versions_measured_is_installed_only_if_adopted(folder, tmp_path):
    write_document(tmp_path, H200, [entry_of(PROBLEM, PAIR)], torch="2.11.0")
    with pytest.raises(ValueError, match=r"other versions \(torch 2.11.0, here 2"):
        cache.install(tmp_path / CLASS_FILE)
    assert found() == []
    cache.install(tmp_path / CLASS_FILE, adopt=True)
    assert found() == [(PAIR, "tuned")]


def test_what_cannot_be_installed_is_said(folder, tmp_path):
    write_document(tmp_path, H200, [entry_of(PROBLEM, PAIR)], kernel="0")
    with pytest.raises(ValueError, match="measured with kernels 0"):
        cache.install(tmp_path / CLASS_FILE, adopt=True)
    with pytest.raises(FileNotFoundError):
        cache.install(tmp_path / "nothing.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ValueError, match=r"broken.json holds no remembered choices"):
        cache.install(tmp_path / "broken.json")
    (tmp_path / "false.json").write_text(GOOD.replace('"kernel": "pair"', '"kernel": "pear"'))
    with pytest.raises(ValueError, match="false.json holds a broken entry"):
        cache.install(tmp_path / "false.json")
    assert not folder.exists()


def test_clearing_takes_nothing_that_is_not_ours(folder):
    cache.remember([entry_of(PROBLEM, PAIR)], H200)
    write_document(folder, DEVICES["L4"], [entry_of(PROBLEM, PAIR)], torch="2.11.0")
    cache.remember([entry_of(PROBLEM, PAIR)], DEVICES["L4"])
    for name in ("package.json", "nvidia-h200.txt", "a.b.json"):
        (folder / name).write_text("mine")
    assert {path.name for path in cache.clear()} == {
        CLASS_FILE,
        "nvidia-l4.bf16-bf16.json",
        "nvidia-l4.bf16-bf16.json.old",
    }
    assert {path.name for path in folder.iterdir() if not path.name.startswith(".")} == {
        "package.json",
        "nvidia-h200.txt",
        "a.b.json",
    }


def test_every_file_is_listed_with_why_it_does_not_count(folder, shipped):
    cache.remember([entry_of(PROBLEM, PAIR)], H200)
    write_document(folder, DEVICES["A100"], [entry_of(PROBLEM, PAIR)])
    write_document(shipped, H200, [entry_of(PROBLEM, PAIR)], kernel="0")
    (folder / "nvidia-l4.bf16-bf16.json").write_text("{")
    said = {file.path: file.problem for file in cache.files(H200)}
    assert said[folder / CLASS_FILE] is None
    assert "NVIDIA A100" in said[folder / file_name(DEVICES["A100"], "bf16-bf16")]
    assert "JSONDecodeError" in said[folder / "nvidia-l4.bf16-bf16.json"]
    assert said[shipped / CLASS_FILE] == "of NVIDIA H200 and kernels 0"


def test_a_remembered_choice_is_run_at_once(folder, monkeypatch):
    from decompose_k import execute, reference

    seen = []

    def spy(config, *arguments, **options):
        seen.append(config)
        return reference.torch_matmul(config, *arguments, **options)

    monkeypatch.setattr(execute, "torch_matmul", spy)
    a, b = torch.ones(9, 9000), torch.ones(9000, 5)
    dk.matmul(a, b)
    problem = dk.Problem.make(9, 5, 9000, FP32, device_type="cpu")
    cache.remember([entry_of(problem, SPLIT)], dk.Device.of("cpu"))
    dk.matmul(a, b)
    dk.matmul(a[:7], b)
    dk.matmul(a, b, split_k=3)
    cache.clear()
    dk.matmul(a, b)
    splits = [dk.Config("mm"), SPLIT, dk.Config("mm"), dk.Config("bmm_sum", split_k=3), dk.Config("mm")]
    assert seen == splits


def test_the_name_of_a_cpu_has_its_threads():
    here = dk.Device.of("cpu")
    assert here.multiprocessors == torch.get_num_threads()
    assert here.name.endswith(f", {here.multiprocessors} thread{'s' * (here.multiprocessors > 1)}")
    assert CPU.type == here.type == "cpu"


def test_an_unreadable_text_says_what_is_wrong():
    with pytest.raises(UnreadableFileError, match="its format is 2, not 1"):
        store.parse(GOOD.replace('"format": 1', '"format": 2'))


@pytest.mark.parametrize("microseconds", [10**400, 1e30, 0, -1.0, float("nan")], ids=lambda value: str(value)[:6])
def test_a_timing_that_nobody_measured_is_no_entry(microseconds):
    values = entry_of(PROBLEM, PAIR).to_json()
    for timing in values["timings"]:
        timing["p50_us"] = microseconds
    with pytest.raises(ValueError, match="^timings must be finite"):
        Entry.from_json(values)
