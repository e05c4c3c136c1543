"""What follows from remembered choices is kept until these change, and not a moment longer."""

from __future__ import annotations

import pytest

from decompose_k import forgetting
from decompose_k.forgetting import forget, forgettable


@pytest.fixture(autouse=True)
def apart(monkeypatch):
    """What is made here is not emptied with the library's own."""
    monkeypatch.setattr(forgetting, "_KEPT", forgetting._Kept())


def test_a_value_is_computed_once_until_it_is_to_be_forgotten():
    computed = []

    @forgettable(2)
    def double(x, *, sign=1):
        """Twice x."""
        computed.append(x)
        return 2 * x * sign

    assert (double.__name__, double.__doc__) == ("double", "Twice x.")
    assert [double(3), double(3), double(3, sign=-1)] == [6, 6, -6]
    assert computed == [3, 3]
    forget()
    assert double(3) == 6
    assert computed == [3, 3, 3]
    for x in range(5):
        double(x)
    double(0)
    assert computed[-1] == 0


def test_a_value_that_was_being_computed_meanwhile_is_not_kept():
    """As where one thread chooses while another tunes."""
    answers = iter(["old", "new", "newer"])

    @forgettable(8)
    def choose():
        answer = next(answers)
        if answer == "old":
            forget()
        return answer

    assert [choose(), choose(), choose()] == ["old", "new", "new"]
