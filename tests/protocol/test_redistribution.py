"""The redistribution of state after a rescale, with the results of Flink 2.3.0 for the same inputs."""

from __future__ import annotations

import pytest

from headgate.runtime.protocol.redistribution import broadcast, spread_splits


def test_one_list_of_five_to_three_subtasks() -> None:
    assert spread_splits({"s": [0, 1, 2, 3, 4]}, 3) == {"s": [[0, 1], [2, 3], [4]]}


def test_seven_items_to_two_subtasks_are_four_and_three() -> None:
    (shares,) = spread_splits({"s": list(range(7))}, 2).values()
    assert [len(share) for share in shares] == [4, 3]


def test_remainders_of_several_states_do_not_pile_up_on_one_subtask() -> None:
    shares = spread_splits({"a": [1], "b": [2], "c": [3], "d": [4, 5]}, 3)
    assert shares["a"] == [[1], [], []]
    assert shares["b"] == [[], [2], []]
    assert shares["c"] == [[], [], [3]]
    assert shares["d"] == [[4], [5], []]


@pytest.mark.parametrize("parallelism", range(1, 9))
def test_every_item_goes_somewhere_once_and_loads_differ_by_one(parallelism: int) -> None:
    states = {f"s{n}": [(n, i) for i in range(n * 3 % 7)] for n in range(9)}
    shares = spread_splits(states, parallelism)
    for name, items in states.items():
        assert [item for share in shares[name] for item in share] == items
    loads = [sum(len(shares[name][i]) for name in states) for i in range(parallelism)]
    assert max(loads) - min(loads) <= 1


def test_broadcast_from_two_to_three_gives_copies_0_1_0() -> None:
    assert broadcast([["zero"], ["one"]], 3) == [["zero"], ["one"], ["zero"]]
