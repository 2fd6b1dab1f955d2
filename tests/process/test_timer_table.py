"""The table of timers against a dictionary, through cuts, deltas, restores and rescaling."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.state.hashing import hash_key, key_group_of
from headgate.state.keyed.keys import OPAQUE_KEYS, KeyShape, keys_of_type
from headgate.state.keyed.timers import STALE_ENTRIES_MIN, MemoryTimerTable, timer_layout
from headgate.state.snapshot import DELETED_COLUMN, KEY_GROUP_COLUMN, RestoredState, TableCut

GROUPS = 16
STRINGS = keys_of_type(str)

Model = dict[tuple[Any, Any], int]


def make(keys: KeyShape = STRINGS, tags: Any = str) -> MemoryTimerTable:
    return MemoryTimerTable("timers", timer_layout(keys, tags), GROUPS)


def stored(table: pa.Table) -> RestoredState:
    return RestoredState(tables={"timers": table})


def rows(table: pa.Table) -> Model:
    found = list(
        zip(*(table.column(name).to_pylist() for name in ("key", "map_key", "value")), strict=True)
    )
    result = {(key, tag): at for key, tag, at in found}
    assert len(result) == len(found)
    return result


def due(model: Model, until: int) -> list[tuple[int, Any, Any]]:
    """Return the timers that a naive implementation fires, by time, then by tag within a key."""
    fired = sorted((at, key, tag) for (key, tag), at in model.items() if at <= until)
    for _, key, tag in fired:
        del model[key, tag]
    return fired


KEYS = st.sampled_from(["a", "b", "c", "d"])
TAGS = st.sampled_from(["", "x", "y"])
TIMES = st.integers(-5, 40)
STEPS = st.one_of(
    st.tuples(st.just("set"), KEYS, TAGS, TIMES),
    st.tuples(st.just("cancel"), KEYS, TAGS),
    st.tuples(st.just("pop"), TIMES),
    st.tuples(st.just("cut")),
    st.tuples(st.just("read")),
    st.tuples(st.just("discard")),
    st.tuples(st.just("restore")),
)


@settings(deadline=None)
@given(st.lists(STEPS, max_size=60))
def test_table_behaves_like_a_dictionary_and_cuts_are_those_of_their_moment(
    steps: list[Any],
) -> None:
    """Cuts are read at some later time, as a delta since the one read before wherever there is one."""
    table, model = make(), Model()
    open_cuts: list[tuple[TableCut, Model]] = []
    base: tuple[int, Model] | None = None
    for step, *arguments in steps:
        if step == "set":
            table.set(*arguments)
            model[arguments[0], arguments[1]] = arguments[2]
        elif step == "cancel":
            there = model.pop((arguments[0], arguments[1]), None) is not None
            assert table.cancel(*arguments) == there
        elif step == "pop":
            until = arguments[0]
            popped = list(table.pop_due(until))
            assert [at for at, _, _ in popped] == sorted(at for at, _, _ in popped)
            assert sorted(popped) == due(model, until)
        elif step == "cut":
            open_cuts.append((table.snapshot(), dict(model)))
        elif step == "read" and open_cuts:
            cut, expected = open_cuts.pop(0)
            since = None if base is None else base[0]
            made = cut.make(since)
            if base is None:
                found = rows(made)
            else:
                gone = made.column(DELETED_COLUMN).to_pylist()
                changed = rows(made)
                found = {**base[1], **changed}
                for address, deleted in zip(changed, gone, strict=True):
                    if deleted:
                        del found[address]
            assert found == expected
            base = cut.epoch, expected
            assert cut.confirm is not None
            cut.confirm(cut.epoch)
        elif step == "discard" and open_cuts:
            cut, _ = open_cuts.pop()
            assert cut.discard is not None
            cut.discard()
        elif step == "restore":
            full = table.snapshot().make(None)
            assert rows(full) == model
            table, open_cuts, base = make(), [], (1, dict(model))
            table.restore(stored(full))
        assert len(table) == len(model)
        assert table.next_time == min(model.values(), default=None)


def test_timers_of_one_key_and_time_come_in_the_order_of_their_tags() -> None:
    table = make()
    for tag in ("b", "c", "a"):
        table.set("k", tag, 10 if tag != "c" else 5)
    table.set("k", "c", 10)
    assert [tag for _, _, tag in table.pop_due(10)] == ["a", "b", "c"]


def test_what_is_set_and_cancelled_while_popping_counts() -> None:
    table = make()
    table.set("k", "first", 1)
    table.set("k", "second", 2)
    table.set("k", "third", 3)
    fired = []
    for at, _, tag in table.pop_due(3):
        fired.append((at, tag))
        if tag == "first":
            table.cancel("k", "second")
            table.set("k", "past", -7)
            table.set("k", "future", 4)
    assert fired == [(1, "first"), (-7, "past"), (3, "third")]
    assert table.next_time == 4


def test_snapshot_is_sorted_by_key_group_and_restores_at_another_parallelism() -> None:
    table = make()
    for number in range(200):
        table.set(f"k{number}", "x", number)
    full = table.snapshot().make(None)
    groups = full.column(KEY_GROUP_COLUMN).to_pylist()
    assert groups == sorted(groups)
    assert groups == [key_group_of(hash_key(key), GROUPS) for key in full.column("key").to_pylist()]
    fired = []
    for first in range(0, GROUPS, 4):
        mask = pa.array([first <= group < first + 4 for group in groups])
        part = make()
        part.restore(stored(full.filter(mask)))
        fired += list(part.pop_due(1_000))
    assert sorted(fired) == [(number, f"k{number}", "x") for number in range(200)]


def test_keys_and_tags_of_all_kinds_come_back_as_they_were() -> None:
    table = make(OPAQUE_KEYS, tuple[int, int])
    for key in (1, True, "1", None, ("a", 2)):
        table.set(key, (10, 20), 5)
    other = make(OPAQUE_KEYS, tuple[int, int])
    other.restore(stored(table.snapshot().make(None)))
    fired = [(type(key), key, tag) for _, key, tag in other.pop_due(5)]
    assert sorted(map(repr, fired)) == sorted(
        repr((type(key), key, (10, 20))) for key in (1, True, "1", None, ("a", 2))
    )


def test_first_cut_after_a_restore_can_be_a_delta() -> None:
    table = make()
    table.set("a", "", 1)
    table.set("b", "", 2)
    restored = make()
    restored.restore(stored(table.snapshot().make(None)))
    restored.cancel("a", "")
    cut = restored.snapshot()
    assert cut.epoch == 2
    delta = cut.make(1)
    assert delta.column("key").to_pylist() == ["a"]
    assert delta.column(DELETED_COLUMN).to_pylist() == [True]


def test_timer_that_every_record_moves_on_takes_no_more_memory() -> None:
    """A later time is only written down; earlier ones go into the heap, which is cleaned at times."""
    table = make()
    for step in range(10 * STALE_ENTRIES_MIN):
        table.set("k", "later", step)
    assert table._in_buckets == 1
    for step in range(10 * STALE_ENTRIES_MIN):
        table.set("k", "earlier", -step)
        table.set(f"k{step}", "cancelled", 5)
        table.cancel(f"k{step}", "cancelled")
    assert table._in_buckets <= STALE_ENTRIES_MIN + 10
    assert len(table._heap) == len(table._buckets)
    first = 1 - 10 * STALE_ENTRIES_MIN
    assert list(table.pop_due(2**62)) == [
        (first, "k", "earlier"),
        (10 * STALE_ENTRIES_MIN - 1, "k", "later"),
    ]
