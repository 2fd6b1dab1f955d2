"""A bounded source whose records are made once per run, before the job reads any of them.

What makes them runs beside the coordinator, and the result is kept as Parquet in the job's storage. From
then on this is the Parquet source: row groups are the splits, the row within them is the position, and
after a restart the same rows are read again.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Self

import pyarrow as pa

from ...errors import UsageError
from ...operators.source import Record_co, Source, SourceReader, SourceRun
from ..files.scan import latest_in_files
from ..files.source import FileSource
from .result import Result, ResultMaker, delete_results, find_or_make


class PreparedSource(Source[Record_co]):
    """The rows of a result, each read exactly once."""

    bounded = True
    at_rest = True
    needs_storage = True

    def __init__(self, maker: ResultMaker, files: FileSource, keep_result: bool) -> None:
        self.maker = maker
        self.whole: pa.Schema = files.schema
        """The columns of the result, of which `schema` may be a part."""
        self.keep_result = keep_result
        self._result: tuple[Result, str] | None = None
        self._options: Mapping[str, str] = {}
        self._read_by(files)

    def _read_by(self, files: FileSource) -> None:
        self._files = files
        self.schema = files.schema
        self.row_type = files.row_type
        self.rejected_schema = files.rejected_schema

    async def prepare(self, run: SourceRun) -> Self:
        """See the base class. Older results are deleted, since no checkpoint of this run refers to them."""
        result, name = await find_or_make(self.maker, self.whole, run)
        assert run.storage is not None  # `find_or_make` has checked it
        if not self.keep_result:
            await delete_results(run, keep=f"{name}/")
        prepared = copy.copy(self)
        prepared._result = result, f"{run.storage.address}/{name}"
        prepared._options = run.options
        return prepared

    async def discard(self, run: SourceRun) -> None:
        if not self.keep_result:
            await delete_results(run)

    def splits(self, parallelism: int) -> list[bytes]:
        """Return one split per row group, at any parallelism."""
        if self._result is None:
            raise UsageError(
                f"the result of {self.maker.kind.of} is read by a job only: it has not been made",
                fix="to test what is behind it, read the rows from a list instead",
            )
        result, address = self._result
        return result.splits(address)

    def latest(self, splits: Sequence[bytes], column: str) -> int | None:
        return latest_in_files(self._files.with_columns([column]), splits, self._options)

    def reader(self) -> SourceReader:
        return self._files.reader()

    def with_columns(self, columns: Sequence[str]) -> Self:
        """Return a source that reads only these columns of the result, which has all of them."""
        narrow = copy.copy(self)
        narrow._read_by(self._files.with_columns(columns))
        return narrow
