"""Iterators over entries that a user's function holds."""

from __future__ import annotations

from typing import Any

import pytest

from headgate.state.keyed.cuts import Changes
from headgate.state.keyed.handles import ListHandle, MapHandle
from headgate.state.keyed.keys import keys_of_type
from headgate.state.keyed.memory import MemoryBackend
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


def test_handles_of_different_values_share_no_code(make_backend: Any, make_spec: Any) -> None:
    """The interpreter adapts code to one class; a function may have states of several."""
    keys = keys_of_type(int)
    hints = {"number": int, "ratio": float, "totals": dict[str, int]}
    specs = {name: make_spec(name, "value", hint, keys=keys) for name, hint in hints.items()}
    backend = make_backend(keys, specs)
    handles = [backend.value_table(name).handle(None) for name in hints]
    for access in ("get", "set"):
        assert len({id(getattr(handle, access).__code__) for handle in handles}) == len(hints)


@pytest.mark.parametrize("hint", [int, float, list[int]])
def test_an_old_value_is_stored_once_per_cut(
    make_spec: Any, hint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each record writes: what the writes behind the first one of a key cost is the price of a record."""
    stored: list[Any] = []
    monkeypatch.setattr(Changes, "log", lambda changes, part, where, old: stored.append(where))
    keys = keys_of_type(int)
    spec = make_spec("state", "value", hint, keys=keys)
    backend = MemoryBackend(keys, {"state": spec}, 16, 64 << 20)
    table: Any = backend.value_table("state")
    handle = table.handle(None)
    value = [1] if hint == list[int] else hint(1)
    for _ in range(2):
        cut = table.changes.cut()
        for key in (7, 8, 7, 7):
            backend.set_key(key)
            handle.set(value)
        cut.open = False
    assert stored == [7, 8, 7, 8]
