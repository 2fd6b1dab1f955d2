"""Dead letters say where their records stood in the source, as far as it is known."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import headgate as hg
from headgate.connectors import collect, csv_source, from_list, generator, numbers, parquet_source
from headgate.operators.elements import ColumnBatch, ObjectBatch, Positions

COLUMNS = {"n": "int64", "at": "int64"}
BAD = frozenset({3, 4, 17, 40})


def check(row):
    if row.n in BAD:
        raise ValueError("bad")
    return {"n": row.n, "at": row.at}


def check_batch(batch):
    if BAD & set(batch.column("n").to_pylist()):
        raise ValueError("bad")
    return batch


def write(path):
    lines = ["n,at\n"] + [f"{n},{n}\n" for n in range(50)]
    lines.insert(10, "nine,none\n")  # not readable: it is left out
    path.write_text("".join(lines))
    return "".join(lines)


def letters_of(job, stream, failing=None):
    out, letters = collect(guarantee="none"), collect(guarantee="none")
    stream.write(out, name="out")
    (failing or stream).failed.write(letters, name="letters")
    job.run()
    return letters.rows


def line_at(path, offset):
    with path.open("rb") as file:
        file.seek(offset)
        return file.readline().decode()


STEPS = {
    "map": lambda s: s.map(check, into=COLUMNS, name="step", on_error="side_output"),
    "flat_map": lambda s: s.flat_map(
        lambda row: [check(row)], into=COLUMNS, name="step", on_error="side_output"
    ),
    "filter": lambda s: s.filter(lambda row: check(row), name="step", on_error="side_output"),
    "map_batches": lambda s: s.map_batches(
        check_batch, into=COLUMNS, name="step", on_error="side_output"
    ),
}
BEFORE = {
    "nothing": lambda s: s,
    "expressions": lambda s: s.filter("n % 2 = 1 OR n > 3").select("n", "at"),
    "functions": lambda s: (
        s.map(lambda r: {"n": r.n, "at": r.at}, into=COLUMNS, name="same")
        .filter(lambda r: r.n >= 3)
        .flat_map(lambda r: [{"n": r.n, "at": r.at}], into=COLUMNS)
    ),
    "time": lambda s: s.event_time("at").map_batches(lambda batch: batch, into=COLUMNS),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("batch_rows", [7, 8192])
def test_the_line_of_a_file(tmp_path, step, before, batch_rows):
    write(tmp_path / "a.csv")
    job = hg.Job("lines", options={"headgate.task.slice": "1 ms"})
    source = csv_source(
        str(tmp_path), COLUMNS, on_bad_record="drop", batch_rows=batch_rows, split_bytes=100
    )
    stream = STEPS[step](BEFORE[before](job.read(source, name="files")))
    found = letters_of(job, stream)
    assert sorted(letter["record"]["n"] for letter in found) == sorted(BAD)
    for letter in found:
        assert letter["source"] == "files"
        assert letter["split"].startswith(f"{tmp_path}/a.csv to byte ")
        number = letter["record"]["n"]
        assert line_at(tmp_path / "a.csv", letter["offset"]) == f"{number},{number}\n"


def test_the_row_of_a_row_group(tmp_path):
    rows = pa.table({"n": list(range(50)), "at": list(range(50))})
    pq.write_table(rows, tmp_path / "a.parquet", row_group_size=20)
    job = hg.Job("rows")
    read = job.read(parquet_source(str(tmp_path), batch_rows=6), name="files")
    found = letters_of(job, STEPS["map"](read))
    where = {letter["record"]["n"]: (letter["split"], letter["offset"]) for letter in found}
    path = f"{tmp_path}/a.parquet row group"
    assert where == {
        3: (f"{path} 0", 3), 4: (f"{path} 0", 4), 17: (f"{path} 0", 17), 40: (f"{path} 2", 0),
    }  # fmt: skip


def invert(n):
    return 1 // (n % 5)


def test_items_of_lists_and_generated_rows():
    for source in (
        from_list(list(range(20)), splits=3, batch_rows=4),
        numbers(20, splits=2, batch_rows=3),
    ):
        job = hg.Job("items")
        stream = job.read(source, name="in").map(invert, name="step", on_error="side_output")
        found = letters_of(job, stream)
        assert sorted((letter.record, letter.offset) for letter in found) == [
            (n, n) for n in (0, 5, 10, 15)
        ]
        assert {letter.source for letter in found} == {"in"}
        assert all(letter.split.startswith("split ") for letter in found)
    rows = generator({"n": "sequence", "at": "sequence"}, rows=50)
    job = hg.Job("rows")
    found = letters_of(job, STEPS["map"](job.read(rows, name="in")))
    assert sorted((letter["record"]["n"], letter["offset"]) for letter in found) == [
        (n, n) for n in sorted(BAD)
    ]


async def look_up(row):
    return check(row)


FAR = {
    "exchange": lambda s: STEPS["map"](s.rebalance()),
    "chain": lambda s: STEPS["map"](s.filter("n >= 0").disable_chaining()),
    "calls": lambda s: s.map(look_up, into=COLUMNS, name="step", on_error="side_output"),
}


@pytest.mark.parametrize("far", FAR)
def test_in_another_subtask_it_is_not_known(tmp_path, far):
    write(tmp_path / "a.csv")
    job = hg.Job("far", parallelism=2)
    read = job.read(csv_source(str(tmp_path), COLUMNS, on_bad_record="drop"), name="files")
    found = letters_of(job, FAR[far](read))
    assert len(found) == len(BAD)
    assert {(each["source"], each["split"], each["offset"]) for each in found} == {
        (None, None, None)
    }


def test_positions_follow_slices_and_choices():
    positions = Positions("in", "a", np.arange(10, 16))
    columns = ColumnBatch(pa.record_batch({"n": list(range(6))}), None, positions)
    objects = ObjectBatch(list(range(6)), None, positions)
    for batch in (columns, objects):
        part = batch.slice(2, 3).take(np.array([2, 0]))
        assert part.positions.offsets.tolist() == [14, 12]
        assert batch.without_positions().positions is None
        assert batch.positions is positions
