"""The rules of expiry, at the millisecond."""

from __future__ import annotations

from typing import Any

import pytest

from headgate.state.keyed.base import ABSENT
from headgate.state.keyed.handles import ListHandle, MapHandle
from headgate.state.keyed.ttl import Expiry, StateTtl, TtlEntryTable, TtlValueTable


class Clock:
    ms = 0

    def now(self) -> int:
        return self.ms

    use = passed = now


@pytest.fixture
def tables(make_backend: Any, make_spec: Any, int_keys: Any) -> Any:
    def make(**ttl: Any) -> Any:
        specs = {
            "v": make_spec("v", "value", int, keys=int_keys, ttl_ms=100),
            "m": make_spec("m", "map", int, str, keys=int_keys, ttl_ms=100),
            "l": make_spec("l", "list", int, int, keys=int_keys, ttl_ms=100),
        }
        backend = make_backend(int_keys, specs)
        backend.set_key(1)
        clock = Clock()
        expiry = Expiry(100, StateTtl("100ms", **ttl), clock)
        value = TtlValueTable(backend.value_table("v"), expiry)
        entries = [TtlEntryTable(backend.entry_table(name), expiry) for name in "ml"]
        return backend, clock, value, *entries

    return make


@pytest.mark.parametrize(
    ("update", "reads_at", "alive_at", "dead_at"),
    [("write", [50], 99, 100), ("read_and_write", [50, 120], 219, 220)],
)
def test_what_counts_as_use(
    tables: Any, update: str, reads_at: list[int], alive_at: int, dead_at: int
) -> None:
    for at, expected in ((alive_at, 7), (dead_at, ABSENT)):
        _, clock, value, *_ = tables(update=update)
        value.put(7)
        for clock.ms in reads_at:
            assert value.get() == 7
        clock.ms = at
        assert value.get() is expected or value.get() == expected


def test_an_expired_value_can_be_returned_once(tables: Any) -> None:
    _, clock, value, *_ = tables(expired="return_if_not_cleaned_up", cleanup_per_access=0)
    value.put(7)
    clock.ms = 500
    assert value.get() == 7
    assert value.get() is ABSENT


def test_entries_and_elements_expire_singly(tables: Any) -> None:
    _, clock, _, entries, elements = tables()
    handle, listed = MapHandle[str, int](entries), ListHandle[int](elements)
    handle.put("a", 1)
    listed.add(1)
    clock.ms = 60
    handle.put("b", 2)
    listed.add(2)
    clock.ms = 100
    assert list(handle.items()) == [("b", 2)]
    assert not handle.contains("a")
    assert listed.get() == [2]
    clock.ms = 160
    assert handle.is_empty()
    assert listed.get() == []


def test_a_few_others_are_removed_at_each_access(tables: Any) -> None:
    backend, clock, value, *_ = tables(cleanup_per_access=50)
    for key in range(200):
        backend.set_key(key)
        value.put(key)
    clock.ms = 100
    backend.set_key(1_000)
    left = []
    for _ in range(12):
        value.get()
        left.append(len(list(backend.addresses("v"))))
    assert left == sorted(left, reverse=True)
    assert 200 > left[0] >= 150
    assert left[-1] == 0


def test_iterating_does_not_undo_what_is_written_meanwhile(tables: Any) -> None:
    """Renewing and removing concern what is there now, not what was there when the iteration began."""
    _, clock, _, entries, elements = tables(update="read_and_write")
    handle, listed = MapHandle[str, int](entries), ListHandle[int](elements)
    for name in "abc":
        handle.put(name, 1)
    listed.add_all([1, 2, 3])
    clock.ms = 50
    seen = []
    for name, value in handle.items():
        seen.append(value)
        if name == "a":
            handle.put("b", 2)
            handle.remove("c")
    assert seen == [1, 1, 1]
    assert sorted(handle.items()) == [("a", 1), ("b", 2)]
    for _ in listed:
        listed.clear()
    assert listed.get() == []

    handle.put("old", 1)
    clock.ms = 149
    handle.put("new", 1)
    clock.ms = 150
    for name, _ in handle.items():
        assert name == "new"
        handle.put("old", 2)
    assert handle.get("old") == 2


def test_an_expired_entry_that_is_written_while_iterating_stays(tables: Any) -> None:
    _, clock, _, entries, _ = tables(cleanup_per_access=0)
    handle = MapHandle[str, int](entries)
    handle.put("z", 1)
    clock.ms = 50
    handle.put("a", 1)
    clock.ms = 100
    left = handle.items()
    handle.put("z", 2)
    assert dict(left) == {"a": 1}
    assert dict(handle.items()) == {"a": 1, "z": 2}
