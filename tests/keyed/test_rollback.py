"""Tables in memory that go back to a checkpoint are what a restore of it would make of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from headgate.operators.keyed_backend import kept_bytes_max
from headgate.runtime.options.recovery import KEEP_STATE
from headgate.runtime.options.registry import Options
from headgate.state.chain import may_continue
from headgate.state.keyed.committed import CommittedTables
from headgate.state.keyed.cuts import LOOK_EVERY
from headgate.state.keyed.keys import keys_of_type
from headgate.state.keyed.memory import MemoryBackend
from headgate.state.keyed.rollback import KEPT_BYTES_MAX
from headgate.state.keyed.timers import MemoryTimerTable, timer_layout
from headgate.state.snapshot import KeptState, RestoredState, TableCut

GROUPS = 16
KEYS = keys_of_type(str)
NAMES = [f"k{n}" for n in range(9)]
MANY = 64 << 20
TIMERS = "timers"


class Subtask:
    """The tables of a subtask, with a history of random writes and checkpoints.

    Attributes:
        at: the tables of each checkpoint, as they would be read again.
    """

    def __init__(self, make_spec: Any, rng: random.Random) -> None:
        self.rng = rng
        made = [
            make_spec("number", "value", int, keys=KEYS),
            make_spec("pane", "value", list[int], keys=KEYS, namespaced=True),
            make_spec("elements", "list", int, int, keys=KEYS),
            make_spec("entries", "map", list[int], str, keys=KEYS),
            make_spec("brief", "value", int, keys=KEYS, ttl_ms=5),
        ]
        self.specs = {spec.name: spec for spec in made}
        self.at: dict[int, dict[str, pa.Table]] = {}
        self.unread: list[tuple[int, dict[str, TableCut]]] = []
        self.last = self.now = 0
        self.begin()

    def begin(self) -> None:
        self.backend = MemoryBackend(KEYS, self.specs, GROUPS, MANY)
        self.timers = MemoryTimerTable(TIMERS, timer_layout(KEYS), GROUPS, MANY)
        self.told = CommittedTables(self.backend, [], 0)
        self.told.points += self.timers.points

    def write(self) -> None:
        rng, backend = self.rng, self.backend
        key = rng.choice(NAMES)
        backend.set_key(key)
        backend.set_namespace(rng.choice([None, "w"]))
        self.now += 1
        values = {name: backend.value_table(name) for name in ("number", "pane", "brief")}
        elements, entries = map(backend.entry_table, ("elements", "entries"))
        match rng.randrange(10):
            case 0:
                for table in values.values():
                    table.delete()
            case 1:
                elements.clear()
            case 2:
                entries.clear()
            case 3:
                entries.delete(rng.choice("abc"))
            case 4:
                values["brief"].sweep(50, self.now - 5)
            case 5:
                self.timers.cancel(key, "")
            case 6:
                for _ in self.timers.pop_due(self.now):
                    pass
            case _:
                values["number"].put(self.now)
                values["pane"].put([self.now])
                values["brief"].put((self.now, self.now))
                elements.put(elements.last() + 1, self.now)
                entries.put(rng.choice("abc"), [self.now])
                self.timers.set(key, "", self.now + rng.randrange(20))
        backend.clear_key()

    def snapshot(self) -> dict[str, TableCut]:
        cuts = {**self.backend.snapshot({}), TIMERS: self.timers.snapshot()}
        return {name: cut for name, cut in cuts.items() if isinstance(cut, TableCut)}

    def checkpoint(self) -> None:
        """Take a cut; it is read at some later time."""
        self.last += 1
        self.unread.append((self.last, self.snapshot()))
        self.told.cut(self.last)

    def read(self) -> None:
        for checkpoint_id, cuts in self.unread:
            self.at[checkpoint_id] = {name: cut.make(None) for name, cut in cuts.items()}
        self.unread = []

    def live(self, run: int) -> None:
        for _ in range(run):
            self.write()
            match self.rng.randrange(12):
                case 0:
                    self.checkpoint()
                case 1:
                    self.read()
                case 2 if self.last:
                    self.told.aborted(self.rng.randint(1, self.last))
                case 3 if self.last and self.rng.random() < 0.5:
                    self.told.completed(self.rng.randint(1, self.last))
        self.checkpoint()
        for _ in range(self.rng.randrange(12)):
            self.write()
        self.read()

    def keep(self) -> dict[str, KeptState]:
        """End, and leave the states."""
        kept, timers = self.backend.keep(), self.timers.keep()
        assert timers is not None
        return {**kept, TIMERS: timers}

    def take_over(self, kept: dict[str, KeptState], checkpoint_id: int) -> None:
        """Begin again with these states."""
        self.begin()
        state = RestoredState(kept=kept, checkpoint_id=checkpoint_id)
        self.told.restored(checkpoint_id)
        self.backend.restore(state, 0)
        self.timers.restore(state)
        self.last = checkpoint_id

    def tables(self) -> dict[str, pa.Table]:
        return {name: cut.make(None) for name, cut in self.snapshot().items()}


def rows(table: pa.Table) -> list[str]:
    return sorted(map(repr, table.to_pylist()))


@pytest.mark.parametrize("seed", range(12))
def test_states_go_back_to_a_checkpoint(
    make_spec: Any, merge_tables: Callable[..., pa.Table], seed: int
) -> None:
    rng = random.Random(seed)
    subtask = Subtask(make_spec, rng)
    for _ in range(4):
        subtask.live(rng.randrange(60))
        kept = subtask.keep()
        known = set.intersection(*(set(state.checkpoints) for state in kept.values()))
        assert subtask.last in known
        chosen = rng.choice(sorted(known))
        stored = subtask.at[chosen]
        subtask.take_over(kept, chosen)
        assert subtask.timers.next_time == min(stored[TIMERS]["value"].to_pylist(), default=None)
        for _ in range(rng.randrange(8)):  # the next checkpoint is a delta, on what is stored
            subtask.write()
        cuts = subtask.snapshot()
        subtask.told.cut(subtask.last + 1)
        subtask.last += 1
        found = {name: cut.make(1) for name, cut in cuts.items()}
        everything = subtask.tables()
        subtask.at[subtask.last] = everything
        for name, table in everything.items():
            keys = cuts[name].keys
            assert rows(merge_tables(stored[name], found[name], keys)) == rows(table), name
        for table in (subtask.backend.entry_table("elements"),):
            for key in NAMES:
                subtask.backend.set_key(key)
                positions = [position for position, _ in table.entries()]
                assert positions == sorted(positions)
                assert table.last() == max(positions, default=-1)
            subtask.backend.clear_key()


def test_who_still_has_a_kept_table_reaches_nothing(make_spec: Any) -> None:
    """A thread of the user's may have kept a handle of an attempt that is over."""
    subtask = Subtask(make_spec, random.Random(1))
    subtask.checkpoint()
    backend = subtask.backend
    backend.set_key("k1")
    backend.value_table("number").put(7)
    subtask.read()
    kept = subtask.keep()
    with pytest.raises(IndexError):
        backend.value_table("number").put(8)
    subtask.take_over(kept, 1)
    assert not subtask.tables()["number"].num_rows


def test_what_was_stored_in_another_shape_is_read_again(make_spec: Any) -> None:
    """A delta in the present shape cannot build on it, which the table that read it knows."""
    pickled = make_spec("name", "value", Any, keys=KEYS)
    before = MemoryBackend(KEYS, {"name": pickled}, GROUPS, MANY)
    before.set_key("k1")
    before.value_table("name").put(b"x")
    cut = before.snapshot({})["name"]
    assert isinstance(cut, TableCut)
    declared = make_spec("name", "value", bytes | None, keys=KEYS)
    assert may_continue(pickled.info, declared.info)  # the columns are equal
    state = RestoredState(tables={"name": cut.make(None)}, states={"name": pickled.info})
    backend = MemoryBackend(KEYS, {"name": declared}, GROUPS, MANY)
    (points,) = backend.points
    points.restored(1)
    backend.restore(state, 0)
    assert not backend.keep()["name"].checkpoints


def test_too_many_old_values_are_not_kept(make_spec: Any) -> None:
    specs = {"number": make_spec("number", "value", int, keys=keys_of_type(int))}
    backend = MemoryBackend(keys_of_type(int), specs, GROUPS, 100_000)
    (points,) = backend.points
    table = backend.value_table("number")
    points.cut(1)
    for key in range(LOOK_EVERY + 1):
        backend.set_key(key)
        table.put(key)
    assert not points.checkpoints
    points.cut(2)
    backend.set_key(1)
    table.put(5)
    assert backend.keep()["number"].checkpoints == {2}


def test_logs_of_aborted_checkpoints_are_joined(make_spec: Any) -> None:
    subtask = Subtask(make_spec, random.Random(2))
    subtask.live(20)
    (first, *_) = sorted(subtask.backend.points[0].checkpoints)
    for _ in range(20):
        subtask.checkpoint()
        subtask.read()
        subtask.write()
        subtask.told.aborted(subtask.last)
    for points in subtask.told.points:
        cut, length = points.since(first)[0].cut, 0
        while cut is not None:
            cut, length = cut.later, length + 1
        assert length < 8 + len(points.checkpoints)


@pytest.mark.parametrize(("text", "kept"), [("true", True), (" True ", True), ("false", False)])
def test_the_option_is_read_as_other_options_are(text: str, kept: bool) -> None:
    assert kept_bytes_max({KEEP_STATE.key: text}) == (KEPT_BYTES_MAX if kept else 0)
    assert Options({KEEP_STATE.key: text}).get(KEEP_STATE) is kept
