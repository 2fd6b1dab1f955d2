"""Goal: a savepoint that was written is one that jobs begin with, with exactly the rows that were given.

Method: without Spark. States of random types are written, read, written again with another number of key
groups, and decoded by the state's own codecs; real jobs go on from changed savepoints.
"""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headgate.errors import StateError, StorageError
from headgate.runtime.offline.editor import DeclaredOperator, SavepointEditor, write_here
from headgate.runtime.offline.scan import Query, StateScan
from headgate.runtime.offline.snapshot import open_snapshot
from headgate.runtime.savepoint import store as savepoints
from headgate.state.codecs import codec_of
from headgate.state.keyed.canonical import Layout, Rows
from headgate.state.keyed.keys import OPAQUE_KEYS, entry_codec, keys_of_type
from headgate.testing import harness

from .keeper import KEPT, ask, event, keeper_job, read

KEYS = [f"key {number}" for number in range(30)]
NOW_MS = 1_700_000_000_000
_tokens = iter(range(10**9))


def token() -> str:
    return f"{next(_tokens):012x}"


def editor(base: str | None, **arguments: Any) -> SavepointEditor:
    """An editor with the key groups of its base, unless told otherwise."""
    snapshot = None if base is None else open_snapshot(base, {})
    if snapshot is not None:
        arguments.setdefault("max_parallelism", snapshot.located.manifest.max_parallelism)
    return SavepointEditor(
        **{"job": "job", "declared": {}, "options": {}, "now_ms": NOW_MS, **arguments},
        base=snapshot,
    )


def table_of(path: str, operator: str, state: str, **query: Any) -> pa.Table:
    scan = StateScan(open_snapshot(path, {}), Query(operator, state, **query))
    tables = [table for share in scan.shares() for table in scan.read(share)]
    return pa.concat_tables([scan.schema.empty_table(), *tables], promote_options="permissive")


# --- any types -------------------------------------------------------------------------------------


class Point(msgspec.Struct, frozen=True):
    """A value with fields."""

    x: int
    tags: tuple[str, ...] = ()
    at: datetime | None = None


INTS = st.integers(-(2**63), 2**63 - 1)
TIMES = st.datetimes(datetime(1900, 1, 1), datetime(2100, 1, 1)).map(
    lambda d: d.replace(tzinfo=UTC, fold=0)
)
KEY_TYPES: dict[Any, Any] = {
    str: st.text(max_size=20),
    int: INTS,
    bool: st.booleans(),
    bytes: st.binary(max_size=20),
    date: st.dates(),
    datetime: TIMES,
    UUID: st.uuids(),
    tuple[str, int]: st.tuples(st.text(max_size=5), INTS),
    Any: st.one_of(st.text(max_size=5), INTS, st.tuples(INTS, st.text(max_size=3))),
}
VALUE_TYPES: dict[Any, Any] = {
    int: INTS,
    float: st.floats(allow_nan=False),
    str: st.text(max_size=10),
    Decimal: st.decimals(allow_nan=False, allow_infinity=False),
    timedelta: st.timedeltas(timedelta(days=-999), timedelta(days=999)),
    int | None: st.none() | INTS,
    Point: st.builds(
        Point, INTS, st.lists(st.text(max_size=3), max_size=3).map(tuple), TIMES | st.none()
    ),
    tuple[int, str]: st.tuples(INTS, st.text(max_size=3)),
    dict[str, float]: st.dictionaries(st.text(max_size=3), st.floats(allow_nan=False), max_size=3),
    Any: st.one_of(st.text(max_size=3), st.tuples(INTS, INTS)),
}


@st.composite
def states(draw: Any) -> tuple[Layout, Rows, int | None]:
    """A state of some kind and types, and its rows."""
    key, value = draw(st.sampled_from(list(KEY_TYPES))), draw(st.sampled_from(list(VALUE_TYPES)))
    kind = draw(st.sampled_from(["value", "list", "map"]))
    entry = {"value": None, "list": codec_of(int), "map": entry_codec(str)}[kind]
    entries = {"value": st.none(), "list": st.integers(0, 3), "map": st.text(max_size=3)}[kind]
    ttl = draw(st.sampled_from([None, 86_400_000]))
    shape = OPAQUE_KEYS if key is Any else keys_of_type(key)
    layout = Layout(shape, kind, codec_of(value), entry, with_ttl=ttl is not None)
    unique = (lambda pair: (repr(pair[0]), pair[1])) if kind != "value" else (lambda p: repr(p[0]))
    pairs = draw(st.lists(st.tuples(KEY_TYPES[key], entries), max_size=12, unique_by=unique))
    rows = Rows(
        [pair[0] for pair in pairs],
        entries=[pair[1] for pair in pairs] if entry is not None else [],
        values=[draw(VALUE_TYPES[value]) for _ in pairs],
        last_used=[draw(st.integers(0, 2**40)) for _ in pairs] if ttl else [],
    )
    return layout, rows, ttl


def described(rows: Rows) -> list[str]:
    count = len(rows)
    lists = [rows.keys, rows.entries or [None] * count, rows.values, rows.last_used or [0] * count]
    return sorted(map(repr, zip(*lists, strict=True)))


@settings(max_examples=25)
@given(states(), st.integers(1, 4), st.integers(4, 300))
def test_written_read_and_written_again(
    tmp_path_factory: Any, state: Any, parallelism: int, groups: int
) -> None:
    layout, rows, ttl = state
    info = layout.info("kept", ttl_ms=ttl)
    target = str(tmp_path_factory.mktemp("kept"))
    declared = {"step": DeclaredOperator(parallelism, {"kept": info})}
    first = editor(None, declared=declared, max_parallelism=16)
    given = layout.table(rows, 16).drop_columns(["key_group"])
    path = write_here(first, target, token(), {("step", "kept"): given})
    assert open_snapshot(path, {}).state("step", "kept").rows == len(rows) if len(rows) else True
    if not len(rows):
        return
    found = table_of(path, "step", "kept", ttl=ttl is not None)
    assert described(layout.rows(found)) == described(rows)
    assert sorted(map(repr, found.to_pylist())) == sorted(
        map(repr, layout.table(rows, 16).to_pylist())
    )
    again = write_here(editor(path), target, token(), {("step", "kept"): found})
    moved = write_here(editor(again, max_parallelism=groups), target, token(), {})
    last = table_of(moved, "step", "kept", ttl=ttl is not None)
    assert described(layout.rows(last)) == described(rows)
    expected = sorted(layout.table(rows, groups).column("key_group").to_pylist())
    assert last.column("key_group").to_pylist() == expected


# --- real jobs -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def taken(tmp_path_factory: Any) -> tuple[str, list[Any]]:
    """A savepoint of a job with every kind of state, and what the job said of it."""
    with harness(keeper_job()) as running:
        running.push("events", [event(key, n, "ab"[n % 2]) for n, key in enumerate(KEYS, 1)])
        path = running.savepoint(tmp_path_factory.mktemp("taken"))
        return path, ask(running, KEYS)


def resumed(path: str, parallelism: int = 2) -> tuple[list[Any], list[Any]]:
    """Return the state of a job restored from a savepoint, and its timers of the next half minute."""
    with harness(keeper_job(parallelism, max_parallelism=None), restore_from=path) as running:
        said = ask(running, KEYS)
        running.advance_time("30s")
        return said, sorted(running.drain("out"))


@pytest.mark.parametrize("groups", [16, 7, 200])
def test_a_job_goes_on_from_what_was_written(taken: Any, tmp_path: Path, groups: int) -> None:
    """Values, lists, maps, times to live, timers, also with other key groups."""
    path, said = taken
    copied = write_here(editor(path, max_parallelism=groups), str(tmp_path), token(), {})
    assert open_snapshot(copied, {}).located.manifest.max_parallelism == groups
    told, timers = resumed(copied, 3)
    assert told == said
    assert timers == [(key, "timer", "soon") for key in sorted(KEYS)]
    assert read(copied, "keep", "lasting", ttl=True)[0]["last_used"].year == 2026
    seen = [row["value"] for row in read(copied, "keep", "seen")]
    assert sorted(seen) == sorted(KEYS)


def test_states_are_replaced_and_removed(taken: Any, tmp_path: Path) -> None:
    path, said = taken
    rows = table_of(path, "keep", "total")
    doubled = rows.set_column(2, "value", pa.compute.multiply(rows.column("value"), 2))
    change = editor(path)
    change.remove("keep", "amounts")
    repaired = write_here(change, str(tmp_path), token(), {("keep", "total"): doubled.slice(1)})
    gone = rows.column("key")[0].as_py()
    told, _ = resumed(repaired)
    assert told == [
        (key, 0 if key == gone else 2 * total, account, [], *rest)
        for key, total, account, _, *rest in said
    ]


def test_a_first_savepoint(taken: Any, tmp_path: Path) -> None:
    """States that only a job declares; what is not given is empty."""
    spec_of = open_snapshot(taken[0], {})
    infos = {s.name: s.info for s in spec_of.states() if s.operator == "keep" and s.info}
    first = editor(None, declared={"keep": DeclaredOperator(2, infos)}, max_parallelism=32)
    rows = pa.table({"key": KEYS[:2], "value": [5, 6]})
    path = write_here(first, str(tmp_path), token(), {("keep", "total"): rows})
    told, timers = resumed(path)
    assert [one[1] for one in told if one[0] in KEYS[:2]] == [5, 6]
    assert sum(one[1] for one in told) == 11
    assert timers == []


def test_windows_and_everything_else_go_along(tmp_path: Path) -> None:
    """The kept savepoint of every kind of state, with other key groups, is whole."""
    moved = write_here(editor(str(KEPT), max_parallelism=50), str(tmp_path), token(), {})
    for state in open_snapshot(str(KEPT), {}).states():
        before = read(str(KEPT), state.operator, state.name)
        after = read(moved, state.operator, state.name)
        if state.identity == ("key_group",):
            assert len(after) == 50
            assert {r["watermark"] for r in after} == {r["watermark"] for r in before}
            continue
        for row in [*before, *after]:
            row.pop("key_group", None)
        assert sorted(map(repr, after)) == sorted(map(repr, before)), state.text


def test_to_s3_and_from_there_with_other_key_groups(taken: Any, s3_server: Any) -> None:
    path, _ = taken
    options = dict(s3_server.options)
    kept = f"s3://{s3_server.bucket}/kept"
    first = editor(path, options=options)
    for state in {one.name for one in open_snapshot(path, {}).states() if one.operator == "keep"}:
        if state not in ("by_kind", "seen"):
            first.remove("keep", state)
    remote = open_snapshot(write_here(first, kept, token(), {}), options)
    again = SavepointEditor(
        job="job", base=remote, declared={}, max_parallelism=33, options=options, now_ms=NOW_MS
    )
    rewritten = open_snapshot(write_here(again, kept, token(), {}), options)
    columns = ("key", "map_key", "value")
    expected = sorted(map(repr, read(path, "keep", "by_kind", columns=columns)))
    for one in (remote, rewritten):
        found = read(one, "keep", "by_kind", columns=columns, shares=2)
        assert sorted(map(repr, found)) == expected
    assert read(rewritten, "keep", "seen") == read(path, "keep", "seen")


def test_a_savepoint_whose_publication_is_in_doubt_is_not_left_without_its_files(
    taken: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = taken
    publish = savepoints.publish

    async def in_doubt(store: Any, savepoint: Any) -> None:
        await publish(store, savepoint)
        raise StorageError("no answer")

    monkeypatch.setattr(savepoints, "publish", in_doubt)
    with pytest.raises(StorageError):
        write_here(editor(path), str(tmp_path), token(), {})
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == []


def test_what_does_not_fit_is_refused(taken: Any, tmp_path: Path) -> None:
    path, _ = taken
    rows = table_of(path, "keep", "total")

    def write(table: pa.Table, operator: str = "keep", state: str = "total") -> None:
        write_here(editor(path), str(tmp_path), token(), {(operator, state): table})

    text = rows.set_column(2, "value", rows.column("value").cast(pa.string()))
    with pytest.raises(StateError, match="`value` is string, and int64 in the state"):
        write(text)
    with pytest.raises(StateError, match=r"`value` \(int64\) is missing"):
        write(rows.drop_columns(["value"]))
    with pytest.raises(StateError, match="`other` is no column of the state"):
        write(rows.append_column("other", rows.column("value")))
    with pytest.raises(StateError, match="several rows of one key"):
        write(pa.concat_tables([rows, rows.slice(0, 1)]))
    with pytest.raises(StateError, match="null is no value of the state"):
        write(rows.set_column(2, "value", pa.nulls(rows.num_rows, pa.int64())))
    with pytest.raises(
        StateError, match=r"(?s)nothing says what the state is.*did you mean `keep.total`"
    ):
        write(rows, state="totals")
    with pytest.raises(StateError, match="only state per key can be written"):
        write(rows, state="seen")
    with pytest.raises(StateError, match=r"(?s)no such state.*there are: account"):
        editor(path).remove("keep", "sum")
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == []
