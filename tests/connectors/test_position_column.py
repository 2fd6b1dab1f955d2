"""`with_position`: each record carries its place in the source, wherever it goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import headgate as hg
from headgate.api.job_definition import definition_of
from headgate.connectors import (
    Crash,
    collect,
    csv_source,
    from_list,
    hybrid_source,
    numbers,
    parquet_source,
    with_position,
)
from headgate.errors import UsageError
from headgate.runtime.manifest import load_job

COLUMNS = {"n": "int64", "at": "int64"}


def write(directory: Path) -> None:
    for file in range(3):
        rows = "".join(f"{100 * file + n},{n}\n" for n in range(40))
        (directory / f"{file}.csv").write_text("n,at\n" + rows)


def line_at(position: dict[str, Any]) -> str:
    path = position["split"].partition(" ")[0]
    with Path(path).open("rb") as file:
        file.seek(position["offset"])
        return file.readline().decode().strip()


def collected(job: hg.Job, stream: Any) -> list[Any]:
    out = collect(guarantee="none")
    stream.write(out, name="out")
    job.run()
    return list(out.rows)


@pytest.mark.parametrize("batch_rows", [7, 8192])
def test_the_place_of_a_record_behind_an_exchange(tmp_path: Path, batch_rows: int) -> None:
    write(tmp_path)
    job = hg.Job("far", parallelism=2)
    source = csv_source(str(tmp_path), COLUMNS, batch_rows=batch_rows, split_bytes=100)
    stream = job.read(with_position(source, "read_at"), name="in").rebalance()
    rows = collected(job, stream.filter("n % 2 = 1"))
    assert sorted(row["n"] for row in rows) == [
        f * 100 + n for f in range(3) for n in range(1, 40, 2)
    ]
    for row in rows:
        assert line_at(row["read_at"]) == f"{row['n']},{row['at']}"


def test_the_place_in_a_dead_letter_behind_an_exchange(tmp_path: Path) -> None:
    write(tmp_path)

    def check(row: Any) -> Any:
        if row.n == 117:
            raise ValueError("no")
        return {"n": row.n}

    job = hg.Job("letters", parallelism=2)
    stream = job.read(with_position(csv_source(str(tmp_path), COLUMNS)), name="in")
    made = stream.rebalance().map(check, into={"n": "int64"}, name="step", on_error="side_output")
    letters = collect(guarantee="none")
    made.failed.write(letters, name="letters")
    assert len(collected(job, made)) == 119
    (letter,) = letters.rows
    assert letter["offset"] is None  # which is why there is the column
    assert line_at(letter["record"]["position"]) == "117,17"


def test_after_a_crash_the_same_places(tmp_path: Path) -> None:
    rows = [{"n": n} for n in range(20)]
    items = [*rows[:10], Crash(), *rows[10:]]
    job = hg.Job("again")
    job.checkpoint(every="10ms", storage=tmp_path)
    job.restart(3, delay="0s")
    source = with_position(from_list(items, schema={"n": "int64"}, batch_rows=3))
    out = collect(guarantee="exactly_once")
    job.read(source, name="in").write(out, name="out")
    job.run()
    assert [row["n"] for row in out.rows] == list(range(20))
    offsets = [row["position"]["offset"] for row in out.rows]
    assert offsets == sorted(set(offsets))


def test_it_is_read_only_where_it_is_used(tmp_path: Path) -> None:
    write(tmp_path)
    source = with_position(csv_source(str(tmp_path), COLUMNS))
    assert source.with_columns(["n"]).schema == pa.schema([("n", pa.int64())])
    assert "position" not in source.with_columns(["n"]).describe()
    job = hg.Job("only")
    rows = collected(job, job.read(source, name="in").select("position"))
    assert len(rows) == 120
    assert {key for row in rows for key in row} == {"position"}


def test_rows_of_parquet(tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": list(range(25))}), tmp_path / "a.parquet", row_group_size=10)
    job = hg.Job("parquet")
    source = with_position(parquet_source(str(tmp_path)))
    rows = collected(job, job.read(source, name="in"))
    assert sorted(row["n"] for row in rows) == list(range(25))
    for row in rows:
        assert row["n"] % 10 == row["position"]["offset"]


def test_around_a_history() -> None:
    past = from_list([{"n": n} for n in range(5)], schema={"n": "int64"})
    live = from_list([{"n": n} for n in range(5, 8)], schema={"n": "int64"})
    job = hg.Job("history")
    rows = collected(job, job.read(with_position(hybrid_source(past, live)), name="in"))
    assert [row["n"] for row in rows] == list(range(8))
    assert [row["position"]["offset"] for row in rows] == [*range(5), *range(3)]


def test_what_it_refuses(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(UsageError, match="makes Python objects"):
        with_position(numbers(3))
    with pytest.raises(UsageError, match=r"has a column of this name already column=`n`"):
        with_position(csv_source(str(tmp_path), COLUMNS), "n")
    with pytest.raises(UsageError, match="takes a source"):
        with_position(3)  # type: ignore[arg-type]


def test_in_a_manifest(tmp_path: Path) -> None:
    write(tmp_path)
    manifest = f"""
apiVersion: headgate.io/v1alpha1
kind: StreamJob
metadata: {{name: traced}}
spec:
  sources:
    in:
      csv: {{path: "{tmp_path}", position: read_at}}
      schema: {{n: long, at: long}}
  sinks:
    out: {{from: in, print: {{}}}}
"""
    path = tmp_path / "traced.yaml"
    path.write_text(manifest)
    (source,) = definition_of(load_job(path)).graph.sources()
    assert source.schema is not None
    assert source.schema.names == ["n", "at", "read_at"]
