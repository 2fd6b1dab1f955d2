"""The table of timers on disk against a plain dictionary, and the move from memory to disk."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from headgate.errors import StateError
from headgate.state.hashing import hash_key, key_group_of
from headgate.state.keyed.canonical import TableSpec
from headgate.state.keyed.keys import OPAQUE_KEYS, KeyShape, encode_token, keys_of_type, token
from headgate.state.keyed.timers import (
    MemoryTimerTable,
    Pending,
    SpillingTimerTable,
    TimerTable,
    tag_order,
    timer_layout,
)
from headgate.state.keygroups import KeyGroupRange, key_group_range
from headgate.state.rocksdb import timers
from headgate.state.rocksdb.timers import RocksDBTimerTable
from headgate.state.settings import MemoryShare, RocksDBSettings
from headgate.state.snapshot import FilesCut, RestoredFiles, RestoredState, TableCut

GROUPS = 16
STRINGS = keys_of_type(str)
SETTINGS = RocksDBSettings(memory_bytes=16 << 20, write_buffer_bytes=64 << 10)
NAME = "timers"
LAST = 2**63 - 1

Model = dict[tuple[Any, Any], int]


class World:
    """Tables of timers, and files of their cuts."""

    def __init__(self, path: Path) -> None:
        self.path, self.number = path, 0
        self.tables: list[TimerTable] = []

    def new_path(self) -> Path:
        self.number += 1
        return self.path / f"{self.number}"

    def on_disk(
        self,
        own: KeyGroupRange = KeyGroupRange(0, GROUPS - 1),
        keys: KeyShape = STRINGS,
        tags: Any = str,
    ) -> RocksDBTimerTable:
        path = self.new_path()
        table = RocksDBTimerTable(
            TableSpec(NAME, timer_layout(keys, tags)),
            GROUPS,
            directory=path,
            key_groups=own,
            file_token=path.name,
            settings=SETTINGS,
        )
        self.tables.append(table)
        return table

    def spilling(
        self, timers: int, own: KeyGroupRange = KeyGroupRange(0, GROUPS - 1)
    ) -> SpillingTimerTable:
        memory = MemoryTimerTable(NAME, timer_layout(STRINGS), GROUPS)
        share = MemoryShare(420 * timers)
        table = SpillingTimerTable(memory, share, lambda: self.on_disk(own))
        self.tables.append(table)
        return table

    def stored(self, cut: TableCut | FilesCut, written: KeyGroupRange) -> Any:
        """The content of a cut, as a store would keep it."""
        if isinstance(cut, TableCut):
            return cut.make(None)
        collected, kept = cut.collect(), {}
        for file in collected.files:
            kept[file.id] = shutil.copy(file.path, self.new_path())
        cut.release()
        return collected.meta, kept, written

    def restored(self, parts: list[Any], own: KeyGroupRange) -> RestoredState:
        """The state of a subtask with these key groups."""
        state = RestoredState()
        tables = [part for part in parts if isinstance(part, pa.Table)]
        if tables:
            rows = pa.concat_tables(tables)
            groups = rows.column(0).to_numpy()
            state.tables[NAME] = rows.filter((groups >= own.first) & (groups <= own.last))
        for part in parts:
            if isinstance(part, tuple) and part[2].overlaps(own):
                meta, kept, written = part
                copies = {id_: Path(shutil.copy(f, self.new_path())) for id_, f in kept.items()}
                files = RestoredFiles(meta, copies, written.first, written.last)
                state.files.setdefault(NAME, []).append(files)
        return state

    def close(self) -> None:
        for table in self.tables:
            table.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


def is_on_disk(table: SpillingTimerTable) -> bool:
    return isinstance(table._table, RocksDBTimerTable)


def group_of(key: Any) -> int:
    return int(key_group_of(hash_key(key), GROUPS))


def apply(table: TimerTable, model: Model, action: tuple[Any, ...]) -> None:
    what, key, tag, *time = action
    if what == "set":
        table.set(key, tag, *time)
        model[key, tag] = time[0]
    else:
        assert table.cancel(key, tag) == (model.pop((key, tag), None) is not None)


def popped(model: Model, until: int) -> Iterator[Pending]:
    """Pop in the promised order: those of a time by tag; first what was set to earlier times meanwhile."""
    while model and (now := min(model.values())) <= until:
        of_now = [address for address, due in model.items() if due == now]
        of_now.sort(
            key=lambda a: (tag_order(token(a[1])), group_of(a[0]), encode_token(token(a[0])))
        )
        for address in of_now:
            yield from popped(model, now - 1)
            if model.get(address) == now:
                del model[address]
                yield now, *address


def random_action(rng: random.Random, near: int) -> tuple[Any, ...]:
    key, tag = f"k{rng.randrange(12)}", rng.choice(["", "x", "x\0", "y"])
    if rng.random() < 0.2:
        return "cancel", key, tag
    return "set", key, tag, near + rng.choice([0, 0, 1, 5, 30, -3, rng.randrange(-50, 50)])


def check_next_time(next_time: int | None, model: Model, now: int) -> None:
    """Times being handled may be left out: that of the last timer, and those that it interrupts."""
    later = min((at for at in model.values() if at > now), default=None)
    before = min((at for at in model.values() if at < now), default=None)
    if before is not None:
        assert next_time == before
    elif next_time != now:
        assert next_time == later or later is None or now < later < next_time


def pop(table: TimerTable, model: Model, until: int, rng: random.Random) -> int:
    """Pop both; a popped timer makes changes, those around the present time among them."""
    count, expected = 0, popped(model, until)
    for found in table.pop_due(until):
        assert found == next(expected)
        count += 1
        for _ in range(rng.choice([0, 0, 1, 3]) if count < 60 else 0):
            apply(table, model, random_action(rng, found[0]))
            if rng.random() < 0.1:
                check_next_time(table.next_time, model, found[0])
    assert next(expected, None) is None
    return count


@pytest.mark.parametrize("seed", range(4))
def test_timers_on_disk_are_those_of_a_dictionary(
    world: World, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through changes while due timers are handled, cuts that are read later, and restores."""
    if seed % 2:
        monkeypatch.setattr(timers, "_LOOK_EVERY", 5)
    rng, model, fired = random.Random(seed), dict[Any, int](), 0
    table: TimerTable = world.on_disk()
    everything = KeyGroupRange(0, GROUPS - 1)
    cuts: list[tuple[Any, Model]] = []
    for step in range(150):
        now = step // 3
        for _ in range(rng.randrange(6)):
            apply(table, model, random_action(rng, now))
        if rng.random() < 0.3:
            fired += pop(table, model, now, rng)
        if rng.random() < 0.08:
            cuts.append((table.snapshot(), dict(model)))
        if cuts and rng.random() < 0.08:
            cut, then = cuts.pop(0)
            if rng.random() < 0.5:
                (rows,) = cut.tables()
                assert content(rows) == then
                cut.release()
            else:
                part = world.stored(cut, everything)
                for other, _ in cuts:
                    other.release()
                table, cuts, model = world.on_disk(), [], then
                table.restore(world.restored([part], everything))
        assert len(table) == len(model)
        assert table.next_time == min(model.values(), default=None)
        for key, tag in (("k1", ""), ("k2", "x")):
            assert table.get(key, tag) == model.get((key, tag))
    fired += pop(table, model, LAST, rng)
    assert fired > 50
    assert not len(table)
    assert table.next_time is None


def content(table: pa.Table) -> Model:
    columns = (table.column(name).to_pylist() for name in ("key", "map_key", "value"))
    return {(key, tag): at for key, tag, at in zip(*columns, strict=True)}


def by_key(
    pending: Iterator[Pending], model: Model, table: TimerTable | None = None
) -> dict[Any, list[Pending]]:
    """Return the popped timers of each key. Each sets further ones of its key, which follow from it."""
    handled: dict[Any, list[Pending]] = {}
    for at, key, tag in pending:
        model.pop((key, tag), None)
        handled.setdefault(key, []).append((at, key, tag))
        rng = random.Random(f"{at} {key} {tag}")
        for number in range(rng.choice([0, 2, 3, 4])):
            further, due = f"{tag}{number}", at + rng.choice([0, 0, 3, -2])
            if at < 25 and len(further) < 5 and (key, further) not in model:
                model[key, further] = due
                if table is not None:
                    table.set(key, further, due)
    return handled


@pytest.mark.parametrize("seed", range(3))
def test_timers_move_to_disk_between_two_times(world: World, seed: int) -> None:
    """In memory, timers of different keys, one tag and one time have no order, so each key is compared."""
    rng, moved = random.Random(seed), 0
    for _ in range(12):
        table, model = world.spilling(rng.choice([6, 8, 10])), dict[Any, int]()
        for _ in range(8):
            action = random_action(rng, 0)
            apply(table, model, ("set", *action[1:3], rng.randrange(12)))
        before = is_on_disk(table)
        twin = dict(model)
        found = by_key(table.pop_due(40), model, table)
        moved += is_on_disk(table) and not before
        assert found == by_key(popped(twin, 40), twin)
    assert moved


def test_cuts_of_both_kinds_are_restored_together_at_any_parallelism(world: World) -> None:
    """Of two subtasks one has its timers in memory, and the other has them on disk."""
    halves = [key_group_range(index, 2, GROUPS) for index in range(2)]
    few, many = world.spilling(1_000, halves[0]), world.spilling(5, halves[1])
    model: Model = {}
    for number in range(300):
        key = f"k{number}"
        apply(few if group_of(key) in halves[0] else many, model, ("set", key, "t", number))
    assert (is_on_disk(few), is_on_disk(many)) == (False, True)
    parts = [
        world.stored(table.snapshot(), own) for table, own in zip((few, many), halves, strict=True)
    ]
    for parallelism in (1, 2, 3):
        found: list[Pending] = []
        for index in range(parallelism):
            own = key_group_range(index, parallelism, GROUPS)
            table = world.spilling(1_000, own)
            state = world.restored(parts, own)
            table.restore(state)
            assert is_on_disk(table) == bool(state.files)
            found += table.pop_due(1_000)
        assert sorted(found) == sorted((at, key, tag) for (key, tag), at in model.items())


def test_many_timers_of_a_table_go_to_disk_at_once(world: World) -> None:
    """As after a change of the backend: the timers of a savepoint, or of memory, are a table."""
    memory, model = MemoryTimerTable(NAME, timer_layout(STRINGS), GROUPS), dict[Any, int]()
    for number in range(50):
        apply(memory, model, ("set", f"k{number}", "", number))
    state = RestoredState(tables={NAME: memory.snapshot().make(None)})
    for room, on_disk in ((100, False), (20, True)):
        table = world.spilling(room)
        table.restore(state)
        assert is_on_disk(table) == on_disk
        assert len(list(table.pop_due(LAST))) == 50
    other = MemoryTimerTable(NAME, timer_layout(STRINGS), GROUPS)
    files = world.stored(world.on_disk().snapshot(), KeyGroupRange(0, GROUPS - 1))
    with pytest.raises(StateError, match="files of another state backend"):
        other.restore(world.restored([files], KeyGroupRange(0, GROUPS - 1)))


def test_keys_tags_and_times_of_all_kinds_come_back_as_they_were(world: World) -> None:
    table = world.on_disk(keys=OPAQUE_KEYS, tags=tuple[int, int])
    for key in (1, True, "1", None, ("a", 2)):
        for at in (-(2**63), -1, 0, LAST):
            table.set(key, (10, at), at)
    found = list(table.pop_due(LAST))
    assert [at for at, _, _ in found] == [at for at in (-(2**63), -1, 0, LAST) for _ in range(5)]
    assert {tag for at, _, tag in found if at == 0} == {(10, 0)}
    assert {repr(key) for _, key, _ in found} == {"1", "True", "'1'", "None", "('a', 2)"}
    assert table.next_time is None
    table.set("again", (1, 1), 5)
    assert list(table.pop_due(LAST)) == [(5, "again", (1, 1))]


def test_table_can_be_closed_while_due_timers_are_handled(world: World) -> None:
    table = world.on_disk()
    for number in range(10):
        table.set(f"k{number}", "", number)
    due = table.pop_due(9)
    next(due)
    table.close()
    due.close()  # type: ignore[attr-defined]


def test_a_cut_uploads_what_is_new(world: World) -> None:
    """The files of a cut that were in the one before have the same names."""
    table = world.on_disk()
    uploaded: list[set[str]] = []
    for low in (0, 5_000, 5_010):
        for number in range(low, low + 5_000 if low == 0 else low + 10):
            table.set(f"k{number}", "", number)
        cut = table.snapshot()
        uploaded.append({file.id for file in cut.collect().files if file.rows > 100})
        cut.release()
    assert uploaded[0]
    assert uploaded[0] <= uploaded[1] <= uploaded[2]
