"""Which worker gets which slots after a failure."""

from __future__ import annotations

from headgate.runtime.coordinator.placement import Seats


def test_everybody_sits_where_it_sat() -> None:
    seats = Seats()
    assert seats.order({"a": "h", "b": "h", "c": "h"}, 3) == ["a", "b", "c"]
    assert seats.order({"b": "h", "c": "h", "d": "h"}, 3) == ["d", "b", "c"], "d for a"
    assert seats.order({"b": "h", "c": "h", "d": "h"}, 3) == ["d", "b", "c"]
    assert seats.order({"d": "h", "e": "h", "f": "h"}, 2) == ["d", "e"]


def test_the_machine_of_the_dead_comes_before_others() -> None:
    seats = Seats()
    assert seats.order({"a": "one", "b": "two"}, 2) == ["a", "b"]
    assert seats.order({"c": "one", "d": "two", "a": "one"}, 2) == ["a", "d"]
    assert seats.order({"c": "one", "e": "three", "d": "two"}, 2) == ["c", "d"]
    assert seats.order({"e": "three", "f": "three"}, 2) == ["e", "f"]


def test_another_number_of_seats() -> None:
    seats = Seats()
    assert seats.order({"a": "h", "b": "h"}, 1) == ["a"]
    assert seats.order({"a": "h", "b": "h"}, 2) == ["a", "b"]
    assert seats.order({"b": "h", "c": "h"}, 1) == ["b"]
