"""Lookups in static tables: rows as of a plain loop; what is wrong with a table is said, and where."""

from __future__ import annotations

import datetime
import decimal
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import headgate as hg
from headgate.connectors import (
    blackhole,
    collect,
    csv_source,
    from_list,
    json_source,
    parquet_source,
    throttle,
)
from headgate.connectors.files.locations import s3_client
from headgate.errors import HeadgateError, PlanError, StorageError, UsageError
from headgate.operators.joins.lookup import TableIndex
from headgate.runtime.protocol.failures import FailureKind
from headgate.testing import harness

ORDER = {"ad": "string", "n": "long", "at": "timestamp"}
ADS = {"ad": "string", "owner": "string", "n": "double"}
EPOCH = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
SEED = 7


@pytest.fixture
def ads(tmp_path: Path) -> Path:
    path = tmp_path / "ads.csv"
    path.write_text("ad,owner,n\nhat,ann,1\nshoe,bob,\n,nobody,0\n")
    return path


def orders_of(*ads: str | None, rows: int = 1024) -> tuple[hg.Job, hg.Stream[Any]]:
    job = hg.Job("orders")
    items = [{"ad": ad, "n": n, "at": EPOCH} for n, ad in enumerate(ads)]
    return job, job.read(from_list(items, schema=ORDER, batch_rows=rows), name="orders")


def ran(job: hg.Job, stream: hg.Stream[Any]) -> list[dict[str, Any]]:
    sink = collect(guarantee="none")
    stream.write(sink, name="out")
    job.run()
    return sink.rows


@pytest.mark.parametrize("parallelism", [1, 2])
@pytest.mark.parametrize("how", ["left", "inner"])
def test_rows_of_the_table_stand_behind_the_records(ads: Path, how: Any, parallelism: int) -> None:
    job, orders = orders_of("hat", "?", None, "shoe", "hat", rows=2)
    table = hg.static_table(csv_source(str(ads), ADS), key="ad")
    joined = orders.rebalance().lookup("ad", table, how=how, suffix="_ad").parallel(parallelism)
    assert joined.schema.names == ["ad", "n", "at", "owner", "n_ad"]
    rows = [(r["n"], r["ad"], r["owner"], r["n_ad"]) for r in ran(job, joined)]
    hat, nobody = ("hat", "ann", 1.0), (None, "nobody", 0.0)
    wanted = [(0, *hat), (1, "?", None, None), (2, *nobody), (3, "shoe", "bob", None), (4, *hat)]
    assert sorted(rows) == [row for row in wanted if how == "left" or row[1] != "?"]


def test_an_inner_lookup_that_keeps_all_and_one_that_keeps_none(ads: Path) -> None:
    table = hg.static_table(csv_source(str(ads), ADS), key="ad", columns=[])
    job, orders = orders_of("hat", "shoe", "hat")
    assert [row["n"] for row in ran(job, orders.lookup("ad", table, how="inner"))] == [0, 1, 2]
    job, orders = orders_of("?", "!")
    assert ran(job, orders.lookup("ad", table, how="inner")) == []


def test_the_table_is_read_again_after_a_crash(ads: Path) -> None:
    job, orders = orders_of()
    table = hg.static_table(csv_source(str(ads), ADS), key="ad", columns=["owner"])
    orders.lookup("ad", table).write(collect(guarantee="exactly_once"), name="out")
    job.checkpoint(every="1h", storage="never-made")
    with harness(job, parallelism=2) as h:
        h.push("orders", {"ad": "hat", "n": 1, "at": h.now})
        h.checkpoint()
        ads.write_text("ad,owner,n\nhat,eve,2\n")
        h.push("orders", {"ad": "hat", "n": 2, "at": h.now})
        h.crash()  # record 2 is read again, and meets the new table
        h.push("orders", {"ad": "shoe", "n": 3, "at": h.now})
        h.checkpoint()
        found = sorted((row["n"], row["owner"]) for row in h.drain("out"))
        assert found == [(1, "ann"), (2, "eve"), (3, None)]


def test_event_time_passes(ads: Path) -> None:
    table = hg.static_table(csv_source(str(ads), ADS), key="ad", columns=["owner"])
    job, orders = orders_of("hat", "?", "hat")
    timed = orders.event_time("at", max_out_of_order="0s").lookup("ad", table, how="inner")
    counted = timed.key_by("owner").window(hg.tumbling("1m")).agg(n=hg.count(), name="count")
    assert [(row["owner"], row["n"]) for row in ran(job, counted)] == [("ann", 2)]


KEYS: dict[str, tuple[pa.DataType, Any]] = {
    "long": (pa.int64(), st.integers(-3, 3) | st.sampled_from([2**62, -(2**63)])),
    "short": (pa.int16(), st.integers(-3, 3)),
    "ulong": (pa.uint64(), st.sampled_from([0, 1, 2**64 - 1])),
    "bool": (pa.bool_(), st.booleans()),
    "string": (pa.string(), st.sampled_from(["", "a", "b", "x" * 20, "x" * 200])),
    "binary": (pa.binary(), st.sampled_from([b"", b"\0", b"\0\0"])),
    "date": (pa.date32(), st.dates(datetime.date(2026, 1, 1), datetime.date(2026, 1, 3))),
    "decimal": (
        pa.decimal128(5, 2),
        st.sampled_from([decimal.Decimal("1.50"), decimal.Decimal(2)]),
    ),
}


@st.composite
def keyed(draw: Any) -> tuple[list[pa.DataType], list[Any], list[Any]]:
    """Types of keys, keys of the table, keys to look up: tuples."""
    kinds = [
        KEYS[kind] for kind in draw(st.lists(st.sampled_from(sorted(KEYS)), min_size=1, max_size=3))
    ]
    key = st.tuples(*(values | st.none() for _, values in kinds))
    lists = st.lists(key, max_size=12)
    return [type_ for type_, _ in kinds], draw(lists), draw(lists)


def arrays(keys: list[Any], types: list[pa.DataType]) -> list[pa.Array]:
    return [pa.array([key[at] for key in keys], type_) for at, type_ in enumerate(types)]


@given(keyed(), st.sampled_from(["first", "last"]))
def test_keys_of_all_types_are_found_as_in_a_dict(found: Any, duplicates: Any) -> None:
    types, table, asked = found
    known: dict[Any, int] = {}
    for row, key in enumerate(table):
        if duplicates == "last" or key not in known:
            known[key] = row
    index = TableIndex(arrays(table, types), SEED, duplicates)
    assert index.rows_of(arrays(asked, types)).tolist() == [known.get(key, -1) for key in asked]
    if len(known) < len(table):
        with pytest.raises(UsageError, match="two rows of the same key"):
            TableIndex(arrays(table, types), SEED, "fail")
    else:
        index = TableIndex(arrays(table, types), SEED, "fail")
        assert index.rows_of(arrays(asked, types)).tolist() == [known.get(key, -1) for key in asked]


def test_many_rows_of_two_keys_as_in_duckdb(tmp_path: Path) -> None:
    wide = duckdb.sql(
        "SELECT (i * 7919) % 50000 AS a, 'k' || i % 3 AS b, i AS v FROM range(60000) t(i) "
        "QUALIFY row_number() OVER (PARTITION BY a, b ORDER BY i) = 1"
    )
    wide.write_parquet(str(tmp_path / "wide.parquet"))
    records = duckdb.sql(
        "SELECT (i * 31) % 70000 AS a, 'k' || i % 4 AS b, i AS n FROM range(20000) t(i)"
    )
    records.write_parquet(str(tmp_path / "records.parquet"))
    wanted = duckdb.sql(
        "SELECT r.a, r.b, n, v FROM records r LEFT JOIN wide w USING (a, b) ORDER BY n"
    )
    job = hg.Job("many")
    stream = job.read(parquet_source(str(tmp_path / "records.parquet")), name="records")
    table = hg.static_table(parquet_source(str(tmp_path / "wide.parquet")), key=("a", "b"))
    rows = ran(job, stream.lookup(("a", "b"), table))
    assert sorted((r["n"], r["a"], r["b"], r["v"]) for r in rows) == [
        (n, a, b, v) for a, b, n, v in wanted.fetchall()
    ]


def test_keys_may_be_dictionaries_and_have_other_names(tmp_path: Path) -> None:
    words = pa.array(["x", "y", None]).dictionary_encode()
    pq.write_table(pa.table({"word": words, "of": words}), tmp_path / "words.parquet")
    table = hg.static_table(
        parquet_source(str(tmp_path / "words.parquet")), key="word", columns=["of", "word"]
    )
    job, orders = orders_of("y", "?", None)
    joined = orders.lookup("ad", table)
    assert joined.schema.field("of").type == pa.string()
    rows = [(row["ad"], row["of"], row["word"]) for row in ran(job, joined)]
    assert rows == [("y", "y", "y"), ("?", None, None), (None, None, None)]


def test_several_files_and_formats_have_the_same_rows(tmp_path: Path) -> None:
    rows = pa.table({"ad": [f"a{n}" for n in range(20)], "v": list(range(20))})
    schema = {"ad": "string", "v": "long"}
    for at in range(2):
        part = rows.slice(at * 10, 10)
        for folder in ("csv", "json", "parquet"):
            (tmp_path / folder).mkdir(exist_ok=True)
        pacsv.write_csv(part, tmp_path / "csv" / f"{at}.csv")
        pq.write_table(part, tmp_path / "parquet" / f"{at}.parquet", row_group_size=3)
        lines = [f'{{"ad": "{row["ad"]}", "v": {row["v"]}}}\n' for row in part.to_pylist()]
        (tmp_path / "json" / f"{at}.json").write_text("".join(lines))
    sources = (
        csv_source(str(tmp_path / "csv"), schema, split_bytes="20b"),
        json_source(str(tmp_path / "json" / "*.json"), schema, batch_rows=2),
        parquet_source(str(tmp_path / "parquet"), batch_rows=2),
    )
    for source in sources:
        read = hg.static_table(source, key="ad").read({})
        assert read.to_pylist() == rows.to_pylist()


def test_a_table_without_rows(tmp_path: Path) -> None:
    (tmp_path / "empty.csv").write_text("ad,owner,n\n")
    for how, count in (("left", 2), ("inner", 0)):
        table = hg.static_table(csv_source(str(tmp_path / "empty.csv"), ADS), key="ad")
        job, orders = orders_of("hat", None)
        rows = ran(job, orders.lookup("ad", table, how=how, suffix="_ad"))  # type: ignore[arg-type]
        assert [row["owner"] for row in rows] == [None] * count


def test_columns_nobody_needs_are_not_read(ads: Path) -> None:
    ads.write_text("ad,owner,n\nhat,ann,no number\n")
    table = hg.static_table(csv_source(str(ads), ADS), key="ad", columns=["owner"])
    assert table.read({}).to_pylist() == [{"ad": "hat", "owner": "ann"}]


def failing(job: hg.Job, stream: hg.Stream[Any]) -> HeadgateError:
    stream.write(blackhole(), name="out")
    job.restart(hg.no_restart())
    with pytest.raises(HeadgateError) as caught:
        job.run()
    return caught.value


TEXTS: list[tuple[str | None, dict[str, Any], str]] = [
    (None, {}, "no file found"),
    ("ad,n\nhat,1\n", {}, "does not have the column exactly once column=`owner`"),
    ("ad,owner,n\nhat,ann,one\n", {}, "a record of a static table could not be read"),
    ("ad,owner,n\nhat,ann,1\nhat,bob,1\n", {}, "two rows of the same key key=`hat`"),
    ("ad,owner,n\n,ann,1\n,bob,1\n", {}, "two rows of the same key key=`None`"),
    ("ad,owner,n\nhat,ann,1\n", {"max_bytes": "10b"}, "larger than max_bytes=`10b`"),
]


@pytest.mark.parametrize(("text", "more", "problem"), TEXTS)
def test_a_table_that_cannot_be_used_fails_the_job_for_good(
    tmp_path: Path, text: str | None, more: dict[str, Any], problem: str
) -> None:
    path = tmp_path / "ads.csv"
    if text is not None:
        path.write_text(text)
    table = hg.static_table(csv_source(str(path), ADS), key="ad", **more)
    job, orders = orders_of("hat")
    error = failing(job, orders.lookup("ad", table, suffix="_ad"))
    assert problem in str(error)
    assert "test_static_lookup.py" in str(error)
    assert not FailureKind.of(error).recoverable


def test_what_is_refused_of_a_table(ads: Path) -> None:
    source = csv_source(str(ads), ADS)
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        (source, {"key": "add"}, "unknown column `add` in key of a static table"),
        (source, {"key": []}, "needs a key"),
        (source, {"key": ["ad", "ad"]}, "a column is named twice key=`ad, ad`"),
        (source, {"key": "n"}, "column `n` cannot be the key of a static table"),
        (source, {"columns": ["own"]}, "unknown column `own` in columns of a static table"),
        (source, {"columns": ["n", "n"]}, "a column is named twice columns"),
        (source, {"max_bytes": 5}, "max_bytes is not a size with a unit"),
        (source, {"max_bytes": "0b"}, "must be in 1b..1gb"),
        (source, {"max_bytes": "2gb"}, "must be in 1b..1gb"),
        (source, {"duplicates": "some"}, "not a rule for equal keys duplicates=`some`"),
        (from_list([], schema=ADS), {}, "read from files"),
        (throttle(source, 5), {}, "read from files"),
        (csv_source(str(ads), ADS, on_bad_record="drop"), {}, "in full or not at all"),
    ]
    for of, more, problem in wrong:
        with pytest.raises(PlanError, match=problem) as caught:
            hg.static_table(of, **{"key": "ad", **more})
        assert "test_static_lookup.py" in caught.value.where


def test_what_is_refused_of_a_lookup(ads: Path) -> None:
    _, orders = orders_of()
    table = hg.static_table(csv_source(str(ads), ADS), key="ad")
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        ("add", {}, "unknown column `add` in lookup"),
        ("n", {}, r"looked up by \(n: int64\), and the key of the table is \(ad: string\)"),
        (("ad", "n"), {}, "equal keys would not match"),
        ("ad", {"suffix": None}, "both have a column `n`"),
        ("ad", {"how": "full"}, "a lookup cannot be how=`full`"),
        ("ad", {"into": ADS}, "a lookup in a table makes no calls: into do not apply"),
    ]
    for key, more, problem in wrong:
        with pytest.raises(PlanError, match=problem):
            orders.lookup(key, table, **{"suffix": "_ad", **more})


def test_a_file_that_changes_while_it_is_read_is_read_again(ads: Path) -> None:
    """It is a failure of the storage, after which the job is started again."""
    source = csv_source(str(ads), ADS, split_bytes="12b")
    reading = source.whole({}, ["ad"])
    next(reading)
    ads.write_text("ad,owner,n\nhat,ann,1\nshoe,ann,1\nsock,ann,1\n")
    with pytest.raises(StorageError, match="changed while it was read"):
        list(reading)


@pytest.mark.server
def test_a_table_on_s3_is_reached_as_the_job_says(s3_server: Any) -> None:
    s3_client(s3_server.options).put_object(
        Bucket=s3_server.bucket, Key="ads/1.csv", Body=b"ad,owner,n\nhat,ann,1\n"
    )
    job = hg.Job("far", options=s3_server.options)
    orders = job.read(from_list([{"ad": "hat", "n": 1, "at": EPOCH}], schema=ORDER), name="orders")
    source = csv_source(f"s3://{s3_server.bucket}/ads", ADS)
    joined = orders.lookup("ad", hg.static_table(source, key="ad", columns=["owner"]))
    assert [row["owner"] for row in ran(job, joined)] == ["ann"]
