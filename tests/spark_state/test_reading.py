"""Goal: what is read of a state is what the job has in it, and no more of its files than needed.

Method: savepoints and checkpoints of real jobs, read without Spark; the expected rows come from the job
itself, from pyarrow's own reader, or from a dictionary.
"""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import headgate as hg
from headgate.connectors import blackhole, from_list
from headgate.errors import StateError, UsageError
from headgate.runtime.offline.scan import Query, StateScan
from headgate.runtime.offline.snapshot import Snapshot, StoredState, metadata_table, open_snapshot
from headgate.testing import harness

from .keeper import KEPT, ask, checkpoints_of, event, keeper_job, read, rows_of

KEYS = [f"key {number}" for number in range(40)]


@pytest.fixture(scope="module")
def kept() -> Snapshot:
    """A savepoint with every kind of state."""
    return open_snapshot(str(KEPT), {})


def directly(state: StoredState) -> list[dict[str, Any]]:
    """The rows of its files, by pyarrow alone."""
    handles = [handle for piece in state.pieces for handle in piece.handles]
    return [
        row
        for handle in handles
        for row in pq.read_table(
            str(KEPT / handle.file) if handle.file else pa.BufferReader(handle.inline)
        ).to_pylist()
    ]


@pytest.mark.parametrize("shares", [1, 5, 100])
def test_every_keyed_state_is_read_whole(kept: Snapshot, shares: int) -> None:
    keyed = [state for state in kept.states() if state.keyed]
    assert {state.kind for state in keyed} == {
        "value", "reducing", "aggregating", "list", "map", "reduce", "running", "window",
    }  # fmt: skip
    for state in keyed:
        scan = StateScan(kept, Query(state.operator, state.name, ttl=state.has_ttl, shares=shares))
        assert rows_of(scan) == directly(state), state.text
        assert len(scan.shares()) == min(shares, len(scan._groups()))


def test_state_of_subtasks(kept: Snapshot) -> None:
    rows = read(kept, "process", "met")
    assert [(row["subtask"], row["position"]) for row in rows] == [
        (0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (1, 3)
    ]  # fmt: skip
    assert sorted(row["value"] for row in rows) == [0, 1, 2, 100, 101, 102]
    assert [row["value"] for row in read(kept, "process", "subtasks")] == ["v0.1 0", "v0.1 1"]
    assert read(kept, "process", "rules") == [{"map_key": "made by", "value": "v0.1"}]
    splits = read(kept, "events", "splits")
    assert [row["subtask"] for row in splits] == [0, 1]
    assert b"part0.csv" in splits[0]["item"]


def test_collected_lists_and_maps(kept: Snapshot) -> None:
    lists: dict[int, dict[int, float]] = {}
    for row in read(kept, "process", "ratios"):
        lists.setdefault(row["id"], {})[row["position"]] = row["value"]
    found = {r["id"]: r["value"] for r in read(kept, "process", "ratios", flatten=False)}
    assert found == {key: [one[i] for i in sorted(one)] for key, one in lists.items()}
    maps: dict[int, dict[str, int]] = {}
    for row in read(kept, "process", "names"):
        maps.setdefault(row["id"], {})[row["map_key"]] = row["value"]
    found = {r["id"]: dict(r["value"]) for r in read(kept, "process", "names", flatten=False)}
    assert found == maps


def test_keys_are_looked_for_only_where_they_lie(kept: Snapshot) -> None:
    scan = StateScan(kept, Query("process", "total", columns=("value",)))
    scan.where("id", [100, 2])
    (share,) = scan.shares()
    groups = {row["id"]: row["key_group"] for row in read(kept, "process", "total")}
    assert [(one.first, one.last) for one in share] == sorted(
        {(groups[100], groups[100]), (groups[2], groups[2])}
    )
    seen: list[tuple[str, ...]] = []
    found = [
        row
        for table in scan.read(share, lambda file, count, names: seen.append(names))
        for row in table.to_pylist()
    ]
    rows = {row["id"]: row["value"] for row in read(kept, "process", "total")}
    assert sorted(row["value"] for row in found) == sorted([rows[100], rows[2]])
    assert all("key_group" in names for names in seen)  # each file has rows of other groups too


def test_only_the_columns_asked_for_are_read(kept: Snapshot) -> None:
    scan = StateScan(kept, Query("windows", "windows", columns=("n", "id"), shares=1))
    seen: list[tuple[str, ...]] = []
    for share in scan.shares():
        for table in scan.read(share, lambda file, count, names: seen.append(names)):
            assert table.column_names == ["n", "id"]
    assert set(seen) == {("id", "n")}


def test_what_cannot_be_asked_for(kept: Snapshot, tmp_path: Path) -> None:
    with pytest.raises(
        StateError, match=r"(?s)no such operator name=`proces`.*did you mean `process`"
    ):
        StateScan(kept, Query("proces", "total"))
    with pytest.raises(
        StateError, match=r"(?s)no such state of operator `process`.*there are: account"
    ):
        StateScan(kept, Query("process", "sum"))
    with pytest.raises(UsageError, match="no such column"):
        StateScan(kept, Query("process", "total", columns=("valu",)))
    with pytest.raises(UsageError, match="no time to live"):
        StateScan(kept, Query("process", "total", ttl=True))
    with pytest.raises(StateError, match="does not fit the column"):
        StateScan(kept, Query("process", "total", values={"id": ("text",)})).shares()
    with pytest.raises(StateError, match="neither a savepoint nor"):
        open_snapshot(str(tmp_path), {})


def test_the_table_of_all_states(kept: Snapshot) -> None:
    rows = {(row["operator"], row["state"]): row for row in metadata_table(kept).to_pylist()}
    assert len(rows) == len(list(kept.states()))
    lasting = rows["process", "lasting"]
    assert (lasting["kind"], lasting["rows"], lasting["ttl_ms"]) == (
        "value",
        6,
        36_500 * 86_400_000,
    )
    assert (lasting["parallelism"], lasting["max_parallelism"]) == (2, 12)
    assert dict(lasting["key_columns"]) == {"id": "int64"}
    assert (lasting["job"], lasting["checkpoint_id"], lasting["format"]) == (
        "compat",
        1,
        "canonical",
    )


def test_a_running_job_and_what_changed_in_it(tmp_path: Path) -> None:
    """Bases with deltas, of checkpoints, are read as the savepoint of the same moment."""
    with harness(keeper_job()) as running:
        running.push("events", [event(key, number) for number, key in enumerate(KEYS, 1)])
        running.checkpoint()
        before = running.savepoint(tmp_path / "kept")
        told_before = {row[0]: row[1] for row in ask(running, KEYS)}
        running.push("events", [event(KEYS[3], 5, "b"), event("new", 7), event(KEYS[4], 0)])
        running.checkpoint()
        running.push("events", event(KEYS[5], 1))
        running.checkpoint()
        after = running.savepoint(tmp_path / "kept")
        told = {row[0]: row[1] for row in ask(running, [*KEYS, "new"])}
        address = checkpoints_of(running, tmp_path / "keeper")
    chains = open_snapshot(address, {}).state("keep", "total")
    assert max(len(piece.handles) for piece in chains.pieces) > 1
    for state in ("total", "account", "amounts", "by_kind", "lasting", "timers_processing"):
        for shares in (1, 7):
            found = read(address, "keep", state, shares=shares)
            assert sorted(map(repr, found)) == sorted(map(repr, read(after, "keep", state))), state
    assert {row["key"]: row["value"] for row in read(address, "keep", "total")} == {
        key: value for key, value in told.items() if key != KEYS[4]
    }
    query = Query("keep", "total", shares=3)
    scan = StateScan(open_snapshot(address, {}), query, open_snapshot(before, {}))
    changes = {
        row["key"]: (row["change"], row["value_before"], row["value_after"])
        for row in rows_of(scan)
    }
    assert changes == {
        KEYS[3]: ("changed", told_before[KEYS[3]], told[KEYS[3]]),
        KEYS[4]: ("removed", told_before[KEYS[4]], None),
        KEYS[5]: ("changed", told_before[KEYS[5]], told[KEYS[5]]),
        "new": ("added", None, 7),
    }
    accounts = StateScan(
        open_snapshot(after, {}), Query("keep", "account"), open_snapshot(before, {})
    )
    assert {row["key"] for row in rows_of(accounts)} == {KEYS[3], KEYS[5], "new"}


def test_older_checkpoints_by_their_number(tmp_path: Path) -> None:
    with harness(keeper_job()) as running:
        for amount in (1, 2):
            running.push("events", event("a", amount))
            last = running.checkpoint()
        address = checkpoints_of(running, tmp_path / "keeper")
    assert read(f"{address}@{last}", "keep", "total")[0]["value"] == 3
    with pytest.raises(StateError, match="no such checkpoint id=`99`"):
        open_snapshot(f"{address}@99", {})


def test_a_damaged_file_is_told(tmp_path: Path) -> None:
    with harness(keeper_job(parallelism=1)) as running:
        running.push("events", [event(key, 1) for key in KEYS])
        path = running.savepoint(tmp_path)
    (file,) = Path(path).glob("keep-*/total/*.parquet")
    chunk = pq.ParquetFile(file).metadata.row_group(0).column(2)
    data = bytearray(file.read_bytes())
    data[chunk.data_page_offset + chunk.total_compressed_size - 1] ^= 0xFF
    file.write_bytes(data)
    with pytest.raises(StateError, match=r"a file of state `total` is corrupt"):
        read(path, "keep", "total")
    file.unlink()
    with pytest.raises(StateError, match=r"a file of state `total` is missing"):
        read(path, "keep", "total")


def test_files_of_backends_are_read_as_tables(kept: Snapshot) -> None:
    """The kept native savepoint is of the same moment as far as the job is concerned: of whole files."""
    native = open_snapshot(str(KEPT.parents[1] / "native" / "savepoint"), {})
    read_natively = 0
    for state in native.states():
        if not any(piece.native for piece in state.pieces):
            continue
        if state.kind == "window":
            with pytest.raises(StateError, match="take a canonical savepoint"):
                read(native, state.operator, state.name)
            continue
        read_natively += 1
        there = read(kept, state.operator, state.name)
        for shares in (1, 5):
            found = read(native, state.operator, state.name, shares=shares)
            assert sorted(map(repr, found)) == sorted(map(repr, there)), state.text
        if state.has_ttl:  # the two savepoints were taken of two runs of the job
            found = read(native, state.operator, state.name, ttl=True)
            assert all(row["last_used"].year in (2024, 2026) for row in found)
    assert read_natively == 11


@pytest.mark.parametrize("ttl", [None, "1d"])
def test_files_of_values_that_reduce_and_agg_keep(tmp_path: Path, ttl: str | None) -> None:
    """In checkpoints with the backend `rocksdb`: columns of all types, and objects."""
    schema = pa.schema(
        [("k", pa.string()), ("at", pa.timestamp("us", tz="UTC")), ("paid", pa.decimal128(9, 2))]
    )
    rows = [
        {"k": f"k{n}", "at": datetime(2026, 1, 1 + n, tzinfo=UTC), "paid": Decimal(n) / 4}
        for n in range(9)
    ]
    job = hg.Job("reduced", options={"state.backend.type": "rocksdb"})
    job.checkpoint(every="1h", storage="s3://lake/checkpoints")
    payments = job.read(from_list(rows, schema=schema), name="rows")
    payments.key_by("k").reduce(lambda a, b: b, name="columns", ttl=ttl).write(
        blackhole(), name="a"
    )
    payments.key_by("k").agg(n=hg.count(), name="sums", ttl=ttl).write(blackhole(), name="b")
    objects = payments.key_with(lambda row: row.k).map_async(same, name="objects")
    objects.key_with(lambda row: row.k).reduce(lambda a, b: b, name="opaque", ttl=ttl).write(
        blackhole(), name="c"
    )
    with harness(job) as running:
        running.push("rows", *rows)
        running.checkpoint()
        found = open_snapshot(checkpoints_of(running, tmp_path), {})
    assert sorted(row["k"] for row in read(found, "sums", "running")) == [row["k"] for row in rows]
    columns = sorted(read(found, "columns", "reduce"), key=lambda row: row["k"])
    assert [row["value"] for row in columns] == rows
    assert len(read(found, "opaque", "reduce")) == len(rows)
    if ttl:
        assert all(row["last_used"] for row in read(found, "columns", "reduce", ttl=True))
        assert all(row["last_used"] for row in read(found, "sums", "running", ttl=True))


@pytest.mark.parametrize(("managed", "on_disk"), [("1mb", True), ("64mb", False)])
def test_timers_on_disk_and_in_memory(tmp_path: Path, managed: str, on_disk: bool) -> None:
    class Remind(hg.KeyedProcess[str, Any, Any]):
        def on_record(self, record: Any, ctx: hg.Context[str]) -> None:
            ctx.event_time.at(record.n, tag="a")
            ctx.event_time.at(record.n + 5, tag="b" if record.n % 2 else "a")

        def on_timer(self, timer: hg.Timer, ctx: hg.Context[str]) -> None: ...

    job = hg.Job("timers", options={"state.backend.type": "rocksdb"})
    job.options["taskmanager.memory.managed.size"] = managed
    job.checkpoint(every="1h", storage="s3://lake/checkpoints")
    rows = [{"k": f"k{n}", "n": n} for n in range(300)]
    stream = job.read(from_list(rows, schema={"k": "string", "n": "long"}), name="rows")
    stream.key_by("k").process(Remind(), name="p").write(blackhole(), name="out")
    with harness(job) as running:
        running.push("rows", *rows)
        running.checkpoint()
        found = open_snapshot(checkpoints_of(running, tmp_path), {})
    native = [piece.native for piece in found.state("p", "timers_event").pieces]
    assert native == [on_disk]
    timers = {(row["k"], row["map_key"]): row["value"] for row in read(found, "p", "timers_event")}
    expected = {(f"k{n}", "a"): n if n % 2 else n + 5 for n in range(300)}
    assert timers == expected | {(f"k{n}", "b"): n + 5 for n in range(1, 300, 2)}


async def same(row: Any) -> Any:
    return row
