"""Checkpoints of RocksDB: consistent while writing, incremental, restored at any parallelism."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from msgspec.structs import replace

from headgate.errors import StateError
from headgate.state.snapshot import RestoredState
from headgate.tests.support.keyed import visits
from headgate.tests.support.threads import begun

HELD = pytest.mark.parametrize("held_bytes", [1, 100_000, 64 << 20])
"""From hardly any value to all of them in memory."""


@HELD
def test_a_checkpoint_beside_writes_is_the_state_at_the_cut(
    world: Any, job: Any, held_bytes: int
) -> None:
    """Cuts that overlap, written by threads while the state changes under them, with small buffers."""
    world.settings = replace(world.settings, held_bytes=held_bytes)
    [backend] = backends = world.start(1)
    rng = random.Random(3)
    job.write(backends, range(3_000), 0)
    waiting: list[tuple[Any, Callable[[], Any], Future[Any] | None]] = []
    for round_ in range(1, 6):
        expected, cuts = job.copy(), backend.snapshot({})
        work = partial(world.collect, cuts, world.own(0, 1))
        # Every other one begins only after further writes and a further cut.
        waiting.append((expected, work, begun(work) if round_ % 2 else None))
        job.write(backends, [rng.randrange(4_000) for _ in range(1_500)], round_)
    making = [(expected, made or begun(work)) for expected, work, made in waiting]
    for expected, made in making:
        expected.check(world.restore([made.result()], 1))
    job.check(backends)


@HELD
@pytest.mark.parametrize("sealed", [False, True], ids=["by the thread", "by the writer"])
def test_values_that_are_not_written_at_a_cut_are_part_of_it(
    world: Any, job: Any, held_bytes: int, sealed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some are new, some changed, some gone, and after the cut they change again."""
    if sealed:
        monkeypatch.setattr("headgate.state.rocksdb.cut.NOTED_MAX", 300)
    world.settings = replace(world.settings, held_bytes=held_bytes)
    [backend] = backends = world.start(1)
    table, numbers = backend.value_table("number"), job.numbers

    def change(keys: range, value: int | None) -> None:
        for key in visits(backend, keys):
            if value is None:
                table.delete()
                numbers.pop(key, None)
            else:
                table.put(value)
                numbers[key] = value
        backend.clear_key()

    change(range(900), 1)
    world.checkpoint(backends)
    change(range(300), None)
    change(range(200, 1_200), 2)
    cuts = []
    for value in range(3, 7):
        cuts.append((job.copy(), backend.snapshot({}), backend.snapshot({})))
        change(range(50 * value, 60 * value), None)
        change(range(100 * value, 100 * value + 500), value)
    for expected, native, canonical in reversed(cuts):
        expected.check(world.restore([world.collect(native, world.own(0, 1))], 2))
        rows = pa.concat_tables(canonical["number"].tables()).select(["key", "value"])
        assert sorted(expected.numbers.items()) == sorted(
            zip(*rows.to_pydict().values(), strict=True)
        )
        for cut in canonical.values():
            cut.release()
    job.check(backends)


def test_values_get_into_the_files_of_the_next_checkpoint_only(world: Any, job: Any) -> None:
    """They are uploaded once: what the thread of a cut writes is not put back by a restore."""
    backends = world.start(1)
    for value in range(3):
        job.write(backends, range(500), value)
        [checkpoint] = world.checkpoint(backends)
        assert not [id_ for one in checkpoint.values() for id_ in one.ids if "undo" in id_]


def test_a_cut_that_no_thread_comes_to_is_sealed_by_the_writer(
    world: Any, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headgate.state.rocksdb.cut.NOTED_MAX", 100)
    world.settings = replace(world.settings, held_bytes=1)  # later changes are written soon
    [backend] = backends = world.start(1)
    job.write(backends, range(500), 1)
    expected, cuts = job.copy(), backend.snapshot({})
    job.write(backends, range(1_000), 2)
    checkpoint = [world.collect(cuts, world.own(0, 1))]
    undo = [id_ for id_ in checkpoint[0]["number"].ids if "undo" in id_]
    assert len(world.store.files[undo[0]].read_bytes()) < 5_000  # 100 keys, not 1,000
    expected.check(world.restore(checkpoint, 1))


def test_only_new_files_are_uploaded(world: Any, job: Any) -> None:
    backends = world.start(1)
    job.write(backends, range(40_000), 1)
    first = world.checkpoint(backends)[0]["number"]
    full = world.store.uploaded_bytes
    job.write(backends, range(0, 40_000, 100), 2)
    second = world.checkpoint(backends)[0]["number"]
    assert set(first.ids) <= set(second.ids)
    assert len(second.ids) == len(first.ids) + 1
    assert world.store.uploaded_bytes - full < 0.1 * full
    before = world.store.uploaded_bytes
    assert world.checkpoint(backends)[0]["number"].ids.keys() == second.ids.keys()
    assert world.store.uploaded_bytes == before


def test_files_do_not_pile_up_and_are_rarely_written_anew(world: Any, job: Any) -> None:
    """Far more checkpoints than files are kept, with three times the state written in all."""
    backends, rng = world.start(1), random.Random(7)
    job.write(backends, range(20_000), 1)
    world.checkpoint(backends)
    full, kept = world.store.uploaded_bytes, []
    for value in range(2, 102):
        job.write(backends, rng.sample(range(20_000), 600), value)
        [checkpoint] = world.checkpoint(backends)
        sizes = [
            world.store.files[i].stat().st_size for one in checkpoint.values() for i in one.ids
        ]
        kept.append((len(sizes), sum(sizes)))
    assert world.store.uploaded_bytes < full * (1 + 100 * 0.03 * 4)
    last = kept[-20:]  # merges run in the background: some of the last have seen them
    assert min(files for files, _ in last) <= 2 * 14
    assert min(size for _, size in last) <= 2.5 * full
    job.check(world.restore([checkpoint], 1))


@pytest.mark.parametrize(
    "parallelisms", [[1, 1], [1, 2], [2, 3], [3, 1], [1, 3, 2, 2, 1], [2, 4, 3]], ids=str
)
def test_rescaling(world: Any, job: Any, parallelisms: list[int]) -> None:
    """With writes between restore and next checkpoint, and a file for each level."""
    backends = world.start(parallelisms[0])
    for value, parallelism in enumerate(parallelisms[1:], 1):
        job.write(backends, range(value * 500, 4_000), value)
        world.checkpoint(backends)
        job.write(backends, range(0, 4_000, 3), value + 10)
        checkpoint = world.checkpoint(backends)
        expected = job.copy()
        job.write(backends, range(100), 99)  # after the checkpoint: lost
        job.numbers, job.names = expected.numbers, expected.names
        backends = world.restore(checkpoint, parallelism)
        job.check(backends)
    job.write(backends, range(2_000), 50)
    job.check(world.restore(world.checkpoint(backends), parallelisms[-1]))


def test_files_without_own_key_groups_are_not_needed(world: Any, job: Any) -> None:
    """Sorted files of deeper levels: a half of the key groups is a part of the files."""
    [backend] = backends = world.start(1)
    databases = [table.database._db for table in backend._tables.values()]
    for value in (1, 2):
        job.write(backends, range(20_000), value)
        backend.value_table("number").flush()
        for database in databases:
            database.set_options({"target_file_size_base": "20000"})
            database.flush()
    for database in databases:
        database.compact_range(None, None)
    job.write(backends, range(50), 3)  # and something on top
    checkpoint = world.checkpoint(backends)
    state = world.restored(checkpoint, world.own(0, 2))
    assert len(state.files["number"][0].files) < len(checkpoint[0]["number"].ids)
    job.check(world.restore(checkpoint, 2))
    job.check(world.restore(checkpoint, 3))

    lost = next(iter(state.files["number"][0].files))
    del state.files["number"][0].files[lost]
    with pytest.raises(StateError, match=lost):
        world.backend(world.own(0, 2)).restore(state, 0)


def test_ids_stay_unique_when_restored_lives_diverge(world: Any, job: Any) -> None:
    """Two lives that begin with the same checkpoint number their files alike; the store notices."""
    backends = world.start(1)
    job.write(backends, range(2_000), 1)
    checkpoint = world.checkpoint(backends)
    old, seen = job.copy(), set(checkpoint[0]["number"].ids)
    lives = [world.restore(checkpoint, 1), world.restore(checkpoint, 1), backends]
    later: list[set[str]] = []
    for value, life in enumerate(lives, 5):
        model = old.copy()
        model.write(life, range(1_000), value)
        taken = world.checkpoint(life)
        later.append(set(taken[0]["number"].ids) - seen)
        model.check(world.restore(taken, 1))
        assert seen & set(taken[0]["number"].ids), "the restored files are not uploaded again"
    assert all(later)
    assert not later[0] & later[1] | later[0] & later[2] | later[1] & later[2]


def test_release_and_close_free_the_disk(world: Any, job: Any) -> None:
    [backend] = backends = world.start(1)
    job.write(backends, range(1_000), 1)
    local: Path = world.local(backend)
    cuts = [backend.snapshot({}) for _ in range(3)]
    for cut in cuts[0].values():
        cut.collect()
    for cut in cuts[1].values():
        list(cut.tables())
    assert [path.name for path in local.glob("*cut*")]
    for cut in [cut for one in cuts for cut in one.values()]:
        cut.release()
    assert not list(local.glob("*cut*"))
    backend.close()
    assert not list(local.iterdir())


def tables_of(backend: Any) -> dict[str, pa.Table]:
    tables = {}
    for name, cut in backend.snapshot({}).items():
        if hasattr(cut, "make"):
            tables[name] = cut.make(None)
        else:
            tables[name] = pa.concat_tables(cut.tables())
            cut.release()
    return tables


@pytest.mark.parametrize("direction", ["to memory", "to rocksdb"])
def test_canonical_tables_go_from_backend_to_backend(world: Any, job: Any, direction: str) -> None:
    [disk] = world.start(1)
    memory = world.memory()
    source, target = (disk, memory) if direction == "to memory" else (memory, disk)
    job.write([source], range(3_000), 1)
    tables = tables_of(source)
    infos = {name: spec.info for name, spec in world.specs.items()}
    for name, table in tables.items():
        assert table.schema.equals(infos[name].arrow_schema(), check_metadata=True)
    target.restore(RestoredState(tables=tables, states=infos), 0)
    job.check([target])
    again = tables_of(target)
    for name, table in tables.items():
        order = [(column, "ascending") for column in infos[name].keys]
        assert again[name].sort_by(order).equals(table.sort_by(order))


def test_a_state_may_come_and_go(world: Any, job: Any) -> None:
    """Each state is a database of its own: the others do not miss it."""
    backends = world.start(1)
    job.write(backends, range(500), 1)
    checkpoint = world.checkpoint(backends)
    names = world.specs.pop("names")
    [fewer] = world.restore(checkpoint, 1)
    assert {key for key, _ in fewer.addresses("number")} == job.numbers.keys()
    checkpoint = world.checkpoint([fewer])
    world.specs = {"names": names, **world.specs}
    job.names = {}
    job.check(world.restore(checkpoint, 1))


def test_damaged_meta_is_an_error(world: Any, job: Any) -> None:
    backends = world.start(1)
    job.write(backends, range(10), 1)
    checkpoint = world.checkpoint(backends)
    checkpoint[0]["number"].meta = b"\x81"
    with pytest.raises(StateError, match="damaged"):
        world.restore(checkpoint, 1)
