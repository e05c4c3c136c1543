"""What guards and keys lead to is kept: how much of it, for how long, and what it holds in memory."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import decompose_k as dk
from decompose_k import calls, guards
from decompose_k.calls import CALLS
from decompose_k.plan import forget_choices
from guards_for_tests import A, B, needs_guards, operands, warm


@needs_guards
def test_a_choice_that_is_forgotten_meanwhile_has_no_guard(monkeypatch):
    warm(A, B)
    CALLS.guarded.clear()
    ((key, shortcuts),) = CALLS._shortcuts.items()

    def forgetting(*arguments):
        forget_choices()
        return shortcuts.for_matmul(*arguments)

    monkeypatch.setitem(CALLS._shortcuts, key, shortcuts._replace(for_matmul=forgetting))
    torch.testing.assert_close(dk.matmul(A, B), A @ B)
    assert CALLS.guarded == {}


def test_operands_that_take_turns_go_by_key_in_the_end(keys):
    columns = B.T.contiguous().T
    for _ in range(2 * calls.MOST_GUARDS):
        warm(A, B)
        warm(A, columns)
    keys.clear()
    made = CALLS._made.total()
    for _ in range(5):
        dk.matmul(A, B)
        dk.matmul(A, columns)
    assert CALLS._made.total() == made
    assert len(keys) >= 5


def test_what_torch_makes_no_guard_for_is_tried_a_few_times(monkeypatch):
    made = []
    monkeypatch.setattr(calls, "guard", lambda *_, **__: made.append(1))
    for _ in range(5 * calls.MOST_GUARDS):
        dk.matmul(A, B)
    assert len(made) == calls.MOST_GUARDS


@needs_guards
@pytest.mark.parametrize("kept", ["guarded", "_shortcuts"])
def test_what_is_forgotten_while_it_is_kept_stays_forgotten(kept, monkeypatch):
    """As another thread may have it forgotten between the last look and the keeping."""

    class Forgetting(dict):
        def __setitem__(self, key, value):
            CALLS.cache_clear()
            super().__setitem__(key, value)

    entries = Forgetting()
    monkeypatch.setattr(CALLS, kept, entries)
    for _ in range(3):
        torch.testing.assert_close(dk.matmul(A, B), A @ B)
        assert entries == {}


@needs_guards
def test_forgetting_forgets():
    warm(A, B)
    forget_choices()
    assert CALLS.guarded == {}


def test_nothing_is_held_in_memory():
    a, b = operands()
    warm(a, b)
    held = [weakref.ref(a), weakref.ref(b)]
    del a, b
    gc.collect()
    assert [reference() for reference in held] == [None, None]


@needs_guards
def test_the_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(calls, "MOST_CALLS", 3)
    for m in range(1, 9):
        warm(*operands(m=m))
        assert len(CALLS.guarded) <= 3


@pytest.mark.parametrize("guards_of_torch", [None, lambda *tensors: None], ids=["none", "other_arguments"])
def test_without_such_guards_every_call_goes_by_its_key(guards_of_torch, monkeypatch, keys):
    monkeypatch.setattr(guards, "_guards", guards_of_torch)
    torch.testing.assert_close(warm(A, B), A @ B)
    assert len(keys) == 3
    assert CALLS.guarded == {}
