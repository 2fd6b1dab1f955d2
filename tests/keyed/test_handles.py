"""Iterators over entries that a user's function holds."""

from __future__ import annotations

from typing import Any

from headgate.state.keyed.handles import ListHandle, MapHandle
from headgate.state.keyed.ttl import Expiry, StateTtl, TtlEntryTable


class Clock:
    def now(self) -> int:
        return 0

    use = passed = now


def test_entries_are_those_of_the_moment_they_are_asked_for(
    make_backend: Any, make_spec: Any, int_keys: Any
) -> None:
    specs = {
        "m": make_spec("m", "map", int, str, keys=int_keys),
        "l": make_spec("l", "list", int, int, keys=int_keys),
        "t": make_spec("t", "map", int, str, keys=int_keys, ttl_ms=100),
    }
    backend = make_backend(int_keys, specs)
    backend.set_key(1)
    expiry = Expiry(100, StateTtl("100ms"), Clock())
    brief = TtlEntryTable(backend.entry_table("t"), expiry)
    for table in (backend.entry_table("m"), brief):
        handle = MapHandle[str, int](table)
        handle.put("a", 1)
        asked = handle.keys(), handle.values(), handle.items()
        handle.clear()
        handle.put("b", 2)
        assert [list(found) for found in asked] == [["a"], [1], [("a", 1)]]
        assert dict(handle.items()) == {"b": 2}
    listed = ListHandle[int](backend.entry_table("l"))
    listed.add_all([1, 2])
    elements = iter(listed)
    listed.update([3])
    assert list(elements) == [1, 2]
    assert listed.get() == [3]
