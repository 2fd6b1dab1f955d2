"""Nexmark's streams in Parquet files, for every engine the same, and the suite's jobs over them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from metering import MeteredSource, TallySink
from nexmark_suite import QUERIES, SHARES, Streams

import headgate as hg
from headgate.connectors import parquet_source
from headgate.connectors.nexmark import nexmark

BLOCK_ROWS = 65_536
GROUP_ROWS = 1 << 20


def write_stream(directory: Path, kind: str, events: int, parts: int) -> None:
    """The rows of one kind in the first `events` events, as `directory`/kind/part.parquet, unless there.

    Blocks of rows are dealt to the parts in turn. Each of several parts is one row group: so a subtask
    of either engine reads one file from end to end, and all come through event time side by side.
    """
    if (directory / kind).exists():
        return
    draft = directory / f"{kind}.draft"
    draft.mkdir(parents=True)
    source, rows = nexmark(kind), events * SHARES[kind] // 50
    blocks = [
        source.make(first, min(BLOCK_ROWS, rows - first)).data
        for first in range(0, rows, BLOCK_ROWS)
    ]
    for part in range(parts):
        own = pa.Table.from_batches(blocks[part::parts], schema=source.schema)
        group = GROUP_ROWS if parts == 1 else max(1, own.num_rows)
        pq.write_table(own, draft / f"{part}.parquet", row_group_size=group)
    draft.rename(directory / kind)


class FileStreams(Streams):
    """The streams from `write_stream`, metered."""

    def __init__(self, job: hg.Job, data: Path, marks: str) -> None:
        super().__init__(job, 0)
        self._data, self._marks = data, marks

    def _read(self, kind: str) -> Any:
        files = parquet_source(str(self._data / kind), batch_rows=BLOCK_ROWS)
        return self._job.read(MeteredSource(files, self._marks, kind), name=kind)


def make_job(name: str, parallelism: int, data: str, directory: str, sums: bool = False) -> hg.Job:
    """Query `name` of the suite as a job over the files in `data`; `directory` takes its marks."""
    job = hg.Job(f"nexmark-{name}-{Path(directory).name}", parallelism=parallelism)
    result = QUERIES[name].build(FileStreams(job, Path(data), directory))
    result.write(TallySink(directory, sums), name="out")
    return job
