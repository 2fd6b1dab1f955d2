"""Files that wait to be committed or read: one of them is damaged before that happens.

A draft of a file sink waits between its pre-commit and its commit, and a file of the result of a Spark
query waits until a subtask reads it. Neither file has a checksum inside: a committed file is for other
programs, and Spark wrote the result.
"""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from headgate.connectors import files_sink, files_source
from headgate.connectors.bad_records import OnBadRecord
from headgate.connectors.files.blocks import FileSplit
from headgate.connectors.prepared.result import ResultFiles, describe_result
from headgate.connectors.spark.source import SPARK
from headgate.operators.elements import ColumnBatch
from headgate.operators.sink import SinkOperator
from headgate.state.snapshot import RestoredState
from headgate.testing.connectors import make_context, read_all

from .corruption import damaged, judge

FORMATS = ("parquet", "csv", "json")
SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string()), ("tags", pa.list_(pa.string()))])
PLAIN = pa.schema(list(SCHEMA)[:2])
"""Types that CSV can hold as well."""


def _rows(start: int, stop: int) -> list[dict[str, Any]]:
    return [
        {"id": n, "name": None if n % 7 == 0 else f"name {n % 5}", "tags": [f"tag {n % 3}"]}
        for n in range(start, stop)
    ]


# -- drafts of a file sink ---------------------------------------------------------------------------


def _start(directory: str, format: str, **context: Any) -> SinkOperator:
    sink = files_sink(directory, format=format, guarantee="exactly_once", roll_bytes=1)  # type: ignore[arg-type]
    operator = SinkOperator(sink)
    given = make_context(**context)
    given.run_in_thread = lambda call: call()  # type: ignore[assignment,method-assign]
    operator.open(given)
    return operator


def write_drafts(directory: str, format: str) -> dict[str, list[bytes]]:
    """Write two drafts of a sink, prepared for checkpoint 1 and not committed; return its state."""
    operator = _start(directory, format)
    for start in (0, 40):
        rows = pa.RecordBatch.from_pylist(_rows(start, start + 40), schema=PLAIN)
        operator.process(ColumnBatch(rows), 0)
    snapshot = operator.snapshot(1)
    assert snapshot is not None
    return {"committables": snapshot.items["committables"].items()}  # type: ignore[operator]


def commit_drafts(directory: str, format: str, state: dict[str, list[bytes]]) -> list[Any]:
    """Restore the sink from its state, which commits the drafts, and read the visible files."""
    operator = _start(directory, format, attempt=2, restored_checkpoint=1)
    operator.restore(RestoredState(items=state))
    operator.close()
    source = files_source(directory, format=format, schema=PLAIN)  # type: ignore[arg-type]
    return sorted(asyncio.run(read_all(source)), key=lambda row: row["id"])


def drafts_in(directory: str) -> list[Path]:
    """Return the drafts that wait in the directory of a sink."""
    return sorted(Path(directory, ".headgate").rglob("part-*"))


def check_draft(format: str, rng: random.Random) -> str:
    """Damage one of two drafts between its pre-commit and its commit; see `judge`."""
    with tempfile.TemporaryDirectory(prefix="headgate-damaged-") as directory:
        state = write_drafts(directory, format)
        draft = rng.choice(drafts_in(directory))
        kind, data = damaged(draft.read_bytes(), rng)
        overwrite(draft, data)
        return judge(
            lambda: commit_drafts(directory, format, state),
            pa.Table.from_pylist(_rows(0, 80), schema=PLAIN).to_pylist(),
            draft.name,
            f"{kind} in a draft of {format}",
        )


# -- files of a result -------------------------------------------------------------------------------


@cache
def _written() -> dict[str, bytes]:
    """Write files as Spark does, with dictionaries, nested columns and several row groups."""
    written = {}
    for number, rows in enumerate((900, 300)):
        table = pa.Table.from_pylist(_rows(1_000 * number, 1_000 * number + rows), schema=SCHEMA)
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, row_group_size=300, compression="zstd", use_dictionary=True)
        written[f"part-{number:05}.parquet"] = sink.getvalue().to_pybytes()
    return written


def write_result(directory: str) -> list[FileSplit]:
    """Write and describe a result in a local directory; return its splits."""
    attempt = Path(directory, "attempt")
    attempt.mkdir(parents=True)
    for name, data in _written().items():
        (attempt / name).write_bytes(data)
    result = describe_result("a query", directory, "attempt", {}, {})
    return [msgspec.msgpack.decode(split, type=FileSplit) for split in result.splits(directory)]


def read_result(splits: list[FileSplit], columns: list[str]) -> list[Any]:
    """Return all rows of a result, read as by a subtask."""
    source = ResultFiles(SCHEMA, OnBadRecord.FAIL, 128, None, SPARK).with_columns(columns)
    rows: list[Any] = []
    for split in splits:
        blocks, last = source.open_split(split, {}), False
        try:
            while not last:
                for piece in blocks.next_block():
                    assert not piece.bad
                    rows += piece.batch.to_pylist() if piece.batch is not None else []
                    last = piece.last
        finally:
            blocks.close()
    return rows


def check_result(rng: random.Random) -> str:
    """Damage one file of a result, and read all of it or some of its columns; see `judge`."""
    columns = rng.choice([["id", "name", "tags"], ["id"], ["name", "tags"]])
    with tempfile.TemporaryDirectory(prefix="headgate-damaged-") as directory:
        splits = write_result(directory)
        expected = read_result(splits, columns)
        path = Path(rng.choice(splits).path)
        kind, data = damaged(path.read_bytes(), rng)
        overwrite(path, data)
        return judge(
            lambda: read_result(splits, columns),
            expected,
            path.name,
            f"{kind} in a file of a result, of which {columns} are read",
        )


def overwrite(path: Path, data: bytes) -> None:
    """Change the bytes as a failing disk does, without a new time of the last change."""
    before = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
