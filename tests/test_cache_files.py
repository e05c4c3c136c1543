"""Files of remembered choices: that none, however broken, unwritable or fought over, costs a call."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

import decompose_k as dk
from cache_for_tests import CLASS_FILE, GOOD, H200, PAIR, PROBLEM, SPLIT, found, write_document
from decompose_k import cache, store
from decompose_k.entries import key_of
from stub_devices import entry_of


def mutations():
    """The good file with one value after another replaced, at every depth."""

    def replaced(value, path=()):
        if path:
            yield ".".join(map(str, path)), path
        children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for name, child in children:
            yield from replaced(child, (*path, name))

    for name, path in replaced(json.loads(GOOD)):
        # What is only a description may say anything.
        if path[-1] not in ("label", "date", "bandwidth", "l2_bytes", "shared_bytes"):
            yield pytest.param(path, id=name.replace(key_of(PROBLEM), "key"))


@pytest.mark.parametrize("garbage", [None, -1, "x", [], {}, [[]]], ids=repr)
@pytest.mark.parametrize("path", list(mutations()))
def test_no_value_in_a_file_can_break_a_plan(folder, path, garbage):
    values = json.loads(GOOD)
    inner = values
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = garbage
    folder.mkdir()
    (folder / CLASS_FILE).write_text(json.dumps(values))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        chosen = dk.plan(PROBLEM, H200)
        cache.files(H200)
        assert cache.remember([entry_of(replace(PROBLEM, n=8), SPLIT)], H200)
    assert isinstance(chosen.config, dk.Config)
    assert found(replace(PROBLEM, n=8)) == [(SPLIT, "tuned")]


def test_a_truncated_file_is_a_miss_wherever_it_ends(folder):
    folder.mkdir()
    for length in range(0, len(GOOD) - 2, 7):
        (folder / CLASS_FILE).write_text(GOOD[:length])
        cache.forget()
        with pytest.warns(UserWarning, match="cannot be read and are left out"):
            assert found() == []


BROKEN = {
    "empty": b"",
    "no-json": b"hello",
    "no-object": b"[1, 2]",
    "no-text": b"\xff\xfe\x00",
    "nested": b"[" * 100_000,
    "other-format": GOOD.replace('"format": 1', '"format": 2').encode(),
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_said_once_and_kept_aside_when_it_is_replaced(folder, content):
    folder.mkdir()
    (folder / CLASS_FILE).write_bytes(content)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        origins = {dk.plan(replace(PROBLEM, m=m), H200).origin for m in (1, 2, 4, 8)}
    assert origins == {"heuristic"}
    assert len(heard) == 1
    assert CLASS_FILE in str(heard[0].message)
    assert cache.remember([entry_of(PROBLEM, PAIR)], H200)
    assert found() == [(PAIR, "tuned")]
    assert (folder / f"{CLASS_FILE}.old").read_bytes() == content


def test_choices_of_other_versions_are_kept_aside_when_they_are_replaced(folder):
    write_document(folder, H200, [entry_of(PROBLEM, PAIR)], torch="2.11.0")
    before = (folder / CLASS_FILE).read_text()
    cache.remember([entry_of(replace(PROBLEM, n=8), SPLIT)], H200)
    assert list(store.read(folder / CLASS_FILE).entries) == [key_of(replace(PROBLEM, n=8))]
    assert (folder / f"{CLASS_FILE}.old").read_text() == before


def test_a_folder_in_the_place_of_a_file_is_a_miss_and_costs_only_the_persistence(folder):
    (folder / CLASS_FILE / "inside").mkdir(parents=True)
    (folder / f"{CLASS_FILE}.old" / "inside").mkdir(parents=True)
    with pytest.warns(UserWarning, match="cannot be read"):
        assert found() == []
    with pytest.warns(UserWarning, match="for this process alone"):
        assert not cache.remember([entry_of(PROBLEM, PAIR)], H200)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert found() == [(PAIR, "tuned")]


def no_home(monkeypatch, tmp_path):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr("decompose_k.settings.cache_directory", homeless)


def below_a_file(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DECOMPOSE_K_CACHE_DIR", str(tmp_path / "file" / "cache"))


def read_only(monkeypatch, tmp_path):
    # Even an administrator cannot make a folder there.
    monkeypatch.setenv("DECOMPOSE_K_CACHE_DIR", "/proc/decompose-k")


def full_disk(monkeypatch, tmp_path):
    monkeypatch.setenv("DECOMPOSE_K_CACHE_DIR", str(tmp_path / "full"))

    def no_space(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store.os, "fsync", no_space)


@pytest.mark.parametrize("place", [no_home, below_a_file, read_only, full_disk], ids=lambda place: place.__name__)
def test_a_cache_that_cannot_be_written_costs_the_persistence_alone(monkeypatch, tmp_path, place):
    place(monkeypatch, tmp_path)
    cache.forget()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert found() == []
        assert dk.plan(PROBLEM, H200).origin == "heuristic"
    with pytest.warns(UserWarning, match="remembered for this process alone, because they cannot be saved"):
        assert not cache.remember([entry_of(PROBLEM, PAIR)], H200)
    assert found() == [(PAIR, "tuned")]
    assert cache.user_entries(H200) == (entry_of(PROBLEM, PAIR),)
    assert list(tmp_path.rglob("*.tmp")) == []
    assert cache.clear(H200) == ()
    assert found() == []


WRITER = """
import sys
from dataclasses import replace
from decompose_k import cache
from stub_devices import entry_of
from cache_for_tests import H200, PAIR, PROBLEM
for index in range(20):
    assert cache.remember([entry_of(replace(PROBLEM, n=1000 * int(sys.argv[1]) + index + 1), PAIR)], H200)
"""

KILLED_WRITER = """
import os, signal, sys
from decompose_k import cache, store
from stub_devices import entry_of
from cache_for_tests import H200, PROBLEM, SPLIT
store.os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
cache.remember([entry_of(PROBLEM, SPLIT)], H200)
"""


def start(code, *arguments):
    here = Path(__file__).parent
    paths = os.pathsep.join((str(here.parent / "src"), str(here)))
    environment = {**os.environ, "PYTHONPATH": paths}
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], env=environment, stderr=subprocess.PIPE, text=True
    )


def test_writers_in_several_processes_lose_nothing(folder):
    writers = [start(WRITER, str(index)) for index in range(4)]
    for writer in writers:
        assert writer.wait() == 0, writer.stderr.read()
        writer.stderr.close()
    assert len(store.read(folder / CLASS_FILE).entries) == 80
    assert [path.name for path in folder.iterdir() if path.suffix == ".tmp"] == []


def test_a_killed_writer_leaves_the_old_file_and_its_leftovers_go(folder, monkeypatch):
    cache.remember([entry_of(PROBLEM, PAIR)], H200)
    with start(KILLED_WRITER) as writer:
        assert writer.wait() == -signal.SIGKILL
    cache.forget()
    assert found() == [(PAIR, "tuned")]
    assert len(list(folder.glob(".*.tmp"))) == 1
    monkeypatch.setattr(store, "_LEFTOVER_SECONDS", -1.0)
    cache.remember([entry_of(PROBLEM, SPLIT)], H200)
    assert found() == [(SPLIT, "tuned")]
    assert list(folder.glob(".*.tmp")) == []


def test_a_lock_that_nobody_lets_go_of_does_not_hang_a_writer(folder, monkeypatch):
    monkeypatch.setattr(store, "MOST_LOCK_SECONDS", 0.05)
    folder.mkdir()
    with store.lock(folder / CLASS_FILE):
        assert cache.remember([entry_of(PROBLEM, PAIR)], H200)
    assert found() == [(PAIR, "tuned")]


def test_without_file_locks_choices_are_saved_all_the_same(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "fcntl", None)
    assert cache.remember([entry_of(PROBLEM, PAIR)], H200)
    assert found() == [(PAIR, "tuned")]
