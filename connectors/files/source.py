"""Reads CSV, JSON lines and Parquet files from a directory or from S3.

Parquet is split by row groups, text by byte ranges of whole lines; the position of the next record is
exact, to the byte or row. Files are read ahead by two blocks in an I/O thread; `poll` never blocks.

A source with `discover_every` also reads files that come later. The parts of such a file are one split
until a subtask takes it, and the split's key is the path. So a file has one reader and is read once,
whatever happens to its size or to `split_bytes` afterwards.
"""

from __future__ import annotations

import asyncio
import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypedDict, Unpack, overload

import msgspec
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from ...errors import HeadgateError, UsageError
from ...operators.base import OperatorContext
from ...operators.connections import counted
from ...operators.durations import Duration, parse_duration
from ...operators.elements import Batch, ColumnBatch, Positions
from ...operators.schema import ColumnsLike, SchemaLike, record_class, to_schema
from ...operators.signatures import passes_on
from ...operators.source import (
    BATCH_ROWS,
    Record,
    Record_co,
    Source,
    SourceReader,
    SplitsLeftOutError,
)
from ...operators.suggestions import suggest
from ..arguments import check_choice, check_count, parse_bytes
from ..bad_records import BadRecordHandler, BadRecordPolicy, OnBadRecord, parse_policy
from . import locations
from .blocks import (
    BlockReader,
    FilePiece,
    FileSplit,
    ParquetReader,
    TextReader,
    first_line,
    is_compressed,
    line_start,
    storage_error,
)
from .decode import (
    BadRecord,
    CsvDecoder,
    JsonDecoder,
    TextDecoder,
    Unreadable,
    parse_header,
)
from .formats import FileFormat, can_encode
from .locations import PathLike
from .scan import latest_in_files, read_whole

FORMATS = ("csv", "json", "parquet", "text")
LINES = pa.schema([pa.field("line", pa.string(), nullable=False)])
"""The column of the format `text`, unless a schema names it."""
REJECTED_SCHEMA = pa.schema(
    [
        pa.field("file", pa.string(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("record", pa.string(), nullable=False),
    ]
)
"""The columns of the side output `rejected`; `offset` is a byte (text) or a row number in a row group."""

_BLOCKS_AHEAD = 2
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
"""The first bytes of texts in UTF-16."""
SPLIT_BYTES: Final = "64mb"


class TextOptions(msgspec.Struct, frozen=True):
    """The form of CSV files."""

    delimiter: str = ","
    header: bool = True
    null_values: tuple[str, ...] = ("",)


class Reading(msgspec.Struct, frozen=True):
    """The settings by which files are cut into splits and read; `files_source` explains the fields."""

    on_bad_record: OnBadRecord
    batch_rows: int
    split_bytes: int
    text: TextOptions


class FoundFile(msgspec.Struct, frozen=True):
    """A file that was found while the job runs, with all of its parts; one split."""

    path: str
    size_bytes: int
    modified_ns: int
    version: str
    parts: list[FileSplit]


class _AnySplit(msgspec.Struct, frozen=True):
    """The fields of a `FileSplit` or a `FoundFile` that tell the two apart."""

    path: str
    parts: list[FileSplit] | None = None


class FileSource(Source[Record_co]):
    """Files of one format, each record read exactly once."""

    bounded = True
    at_rest = True
    rejected_schema = REJECTED_SCHEMA

    def __init__(
        self,
        path: str,
        format: str,
        schema: pa.Schema,
        row_type: type[Any] | None,
        reading: Reading,
        storage_options: Mapping[str, str],
        discover_every_ms: int | None,
    ) -> None:
        if discover_every_ms is not None:
            self.bounded = self.at_rest = False
            self.discovers = self.splits_end = True
            self.discover_every_ms = discover_every_ms
        self.path = path
        self.format = format
        self.schema: pa.Schema = schema
        self.file_columns = tuple(schema.names)
        """All columns of the given schema, of which `schema` may be a part."""
        self.reading = reading
        self.storage_options = dict(storage_options)
        self.row_type = row_type

    def configure(self, options: Mapping[str, str]) -> FileSource[Record_co]:
        """Return a source that reaches the storage by the job's options, where its own options set
        nothing else.
        """
        configured = copy.copy(self)
        configured.storage_options = {**locations.of_storage(options), **self.storage_options}
        return configured

    def check_connection(self, options: Mapping[str, str]) -> str:
        """Check that there are files, and that the first one can be read."""
        known = {**locations.of_storage(options), **self.storage_options}
        found = locations.listed(self.path, known, may_grow=self.discovers)
        for info in found[:1]:
            locations.check_readable(self.path, info, known)
        return counted(len(found), "file")

    def splits(self, parallelism: int) -> list[bytes]:
        """Return one split per row group, or per `split_bytes` of text, at any parallelism."""
        files = locations.find_files(self.path, self.storage_options, may_grow=self.discovers)
        store = self._store(self.storage_options)
        with ThreadPoolExecutor(locations.REQUESTS_MAX, "headgate-splits") as threads:
            parts = threads.map(lambda file: self._cut(store, file), files)
            return [msgspec.msgpack.encode(split) for splits in parts for split in splits]

    def discover(self, known: Mapping[str, bytes]) -> list[bytes]:
        """Return a split for each file. One that has changed stays what it was when it was found."""
        store = self._store(self.storage_options)
        problems: list[str] = []

        def look(info: pafs.FileInfo) -> bytes | None:
            before = known.get(info.path)
            try:
                return self._found(store, info, before)
            except HeadgateError as error:
                problems.append(str(error))
            except (OSError, pa.ArrowException) as error:
                problems.append(str(storage_error(info.path, error)))
            return before

        infos = locations.growing_files(self.path, self.storage_options)
        with ThreadPoolExecutor(locations.REQUESTS_MAX, "headgate-splits") as threads:
            found = [split for split in threads.map(look, infos) if split is not None]
        if problems:
            more = f"; and {len(problems) - 1} more files" if len(problems) > 1 else ""
            raise SplitsLeftOutError(f"not read: {min(problems)}{more}", found)
        return found

    def _found(self, store: pafs.FileSystem, info: pafs.FileInfo, before: bytes | None) -> bytes:
        """Return the split of a file, which is `before` if it was known.

        Raises:
            HeadgateError: it cannot be cut, or has changed since.
        """
        if before is not None:
            old = msgspec.msgpack.decode(before, type=FoundFile)
            same = (info.size, info.mtime_ns) == (old.size_bytes, old.modified_ns)
            if same or locations.version_of(store, info) == old.version:
                return before
            raise UsageError(
                f"a file changed after it was found, and no file is read twice file=`{info.path}`",
                fix="write new data to a file of another name",
            )
        file = locations.FileVersion(info.path, info.size, locations.version_of(store, info))
        parts = self._cut(store, file)
        return msgspec.msgpack.encode(
            FoundFile(file.path, file.size_bytes, info.mtime_ns, file.version, parts)
        )

    def split_key(self, split: bytes) -> str:
        """Return the path of the file, of which the split is a part or the whole."""
        return msgspec.msgpack.decode(split, type=_AnySplit).path

    def latest(self, splits: Sequence[bytes], column: str) -> int | None:
        return latest_in_files(self.with_columns([column]), splits, self.storage_options)

    def reader(self) -> SourceReader:
        return FileReader(self)

    def with_columns(self, columns: Sequence[str]) -> FileSource[Record_co]:
        """Return a source that reads only these columns; values of the others are not checked either."""
        wanted = set(columns)
        # At least one column stays: a batch without columns has no rows to count.
        kept = [field for field in self.schema if field.name in wanted] or [self.schema.field(0)]
        narrow = copy.copy(self)
        narrow.schema = pa.schema(kept)
        narrow.row_type = self.row_type if len(kept) == len(self.schema) else None
        return narrow

    def describe(self) -> str:
        return f"{self.format}({self.path}: {', '.join(self.schema.names)})"

    @property
    def position_unit(self) -> str:
        """The unit of positions in the files: row or byte."""
        return "row" if self.format == "parquet" else "byte"

    def check_as_table(self) -> None:
        """See `operators.joins.static_table.TableFiles`."""
        if not self.bounded:
            raise UsageError(
                "a static table is read once, so further files are not looked for",
                fix="leave discover_every out",
            )
        if self.reading.on_bad_record is not OnBadRecord.FAIL:
            raise UsageError(
                "a static table is read in full or not at all "
                f"on_bad_record=`{self.reading.on_bad_record.value}`",
                fix="leave on_bad_record out, and correct the file",
            )

    def whole(self, options: Mapping[str, str], columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """See `operators.joins.static_table.TableFiles`."""
        narrow = self.with_columns(columns)
        yield from read_whole(narrow, narrow.configure(options).splits(1), options)

    def open_split(self, split: FileSplit, options: Mapping[str, str]) -> BlockReader:
        """Return a reader of one split; blocks. `options` are the job's."""
        store = self._store({**options, **self.storage_options})
        if self.format == "parquet":
            return ParquetReader(store, split, self.schema, self.reading.batch_rows)
        convert: CsvDecoder | JsonDecoder | TextDecoder
        if self.format == "csv":
            convert = CsvDecoder(
                self.schema,
                split.header,
                self.reading.text.delimiter,
                self.reading.text.null_values,
            )
        elif self.format == "text":
            convert = TextDecoder(self.schema)
        else:
            convert = JsonDecoder(self.schema)
        return TextReader(store, split, convert, self.reading.batch_rows)

    def _store(self, options: Mapping[str, str]) -> pafs.FileSystem:
        return locations.filesystem(locations.parse_location(self.path).scheme, options)

    def _cut(self, store: pafs.FileSystem, file: locations.FileVersion) -> list[FileSplit]:
        if self.format == "parquet":
            return self._row_groups(store, file)
        return self._byte_ranges(store, file)

    def _row_groups(self, store: pafs.FileSystem, file: locations.FileVersion) -> list[FileSplit]:
        schema, row_counts = parquet_footer(store, file.path)
        self._check_columns(file.path, schema.names)
        return [
            FileSplit(file.path, file.size_bytes, file.version, 0, end=rows, row_group=index)
            for index, rows in enumerate(row_counts)
            if rows
        ]

    def _byte_ranges(self, store: pafs.FileSystem, file: locations.FileVersion) -> list[FileSplit]:
        start, header = 0, []
        if self.format == "csv":
            header = list(self.file_columns)
            if self.reading.text.header:
                start, header = self._read_header(store, file.path)
        version = (file.path, file.size_bytes, file.version)
        if is_compressed(file.path):
            return [FileSplit(*version, position=start, header=header)]
        splits = []
        while start < file.size_bytes:
            end = line_start(store, file.path, start + self.reading.split_bytes, file.size_bytes)
            splits.append(FileSplit(*version, position=start, end=end, header=header))
            start = end
        return splits

    def _read_header(self, store: pafs.FileSystem, path: str) -> tuple[int, list[str]]:
        """Return the length of the first line, and the column names in it."""
        line = first_line(store, path)
        if line.startswith(_UTF_16):
            raise UsageError(
                f"an input file is in UTF-16, and only UTF-8 is read file=`{path}`",
                fix="convert it, such as with: iconv -f UTF-16 -t UTF-8",
            )
        try:
            names = parse_header(line, self.reading.text.delimiter)
        except Unreadable as error:
            raise UsageError(
                f"the first line of an input file cannot be read as column names: {error} file=`{path}`",
                fix="end its lines with line feeds, as `dos2unix -c mac` does, or correct the line",
            ) from error
        self._check_columns(path, names)
        return len(line), names

    def _check_columns(self, path: str, found: Sequence[str]) -> None:
        for name in self.schema.names:
            if list(found).count(name) != 1:
                raise UsageError(
                    f"an input file does not have the column exactly once column=`{name}` file=`{path}`",
                    fix=suggest(name, found, "columns of the file"),
                )


class FileReader(SourceReader):
    """Reads its splits one after the other."""

    def __init__(self, source: FileSource) -> None:
        self._source = source
        self._splits: deque[FileSplit] = deque()
        """The splits that have not been read to the end, in order. The first one has the current
        position.
        """
        self._unread: deque[FileSplit] = deque()
        """Those of them that reading ahead has not reached yet."""
        self._reading: FileSplit | None = None
        self._blocks: BlockReader | None = None
        self._ready: deque[tuple[FileSplit, deque[FilePiece]]] = deque()
        self._pending: asyncio.Future[list[FilePiece]] | None = None

    def open(self, context: OperatorContext, reject: Callable[[Batch], None]) -> None:
        super().open(context, reject)
        self._bad = BadRecordHandler(
            self._source.reading.on_bad_record, context, reject, "the file"
        )

    def add_splits(self, splits: Sequence[bytes]) -> None:
        added = [part for split in splits for part in _parts(split)]
        # After a change of parallelism splits arrive in any order, in which records would come late.
        added.sort(key=lambda split: (split.path, split.row_group or 0, split.position))
        self._splits.extend(added)
        self._unread.extend(msgspec.structs.replace(split) for split in added)
        for split in added:
            self.context.splits.opened(_name(split), queued=True)

    def poll(self) -> Batch | None:
        while True:
            self._take_block()
            self._read_ahead()
            if not self._ready:
                self.held_back = bool(self._splits)  # a storage may take its time for a block
                return None
            split, pieces = self._ready[0]
            piece = pieces[0]
            if piece.bad:
                self._handle_bad(split.path, piece.bad)
            if self.rows_wanted is not None and self.rows_wanted < len(piece.ends):
                piece = piece.take(self.rows_wanted)
            else:
                pieces.popleft()
                if not pieces:
                    self._ready.popleft()
            self._splits[0].position = piece.position
            if piece.last:
                self._splits.popleft()
                self.context.splits.ended(_name(split))
            if piece.batch is not None and piece.batch.num_rows:
                name = _name(split)
                self.context.splits.reading(name)
                positions = None
                if piece.starts is not None:
                    positions = Positions(self.context.operator_name, name, piece.starts)
                return ColumnBatch(piece.batch, positions=positions)

    async def wait(self) -> None:
        """Return when a block has been read. Cancelling this leaves the reader unchanged."""
        self._read_ahead()
        if self._pending is not None and not self._ready:
            await asyncio.wait([self._pending])

    @property
    def finished(self) -> bool:
        return not self._splits

    def lag_records(self) -> dict[str, int] | None:
        """Return the remaining rows by file for Parquet. The number of records in text files is not
        known.
        """
        if self._source.format != "parquet":
            return None
        left: dict[str, int] = {}
        for split in list(self._splits):
            left[split.path] = left.get(split.path, 0) + (split.end or 0) - split.position
        return left

    def lag_bytes(self) -> int | None:
        """Return the remaining bytes of text files. Compressed files count with their full size until
        they are read to the end.
        """
        if self._source.format == "parquet":
            return None
        return sum(_bytes_left(split) for split in list(self._splits))

    def snapshot(self) -> list[bytes]:
        return [msgspec.msgpack.encode(split) for split in self._splits]

    def close(self) -> None:
        if self._pending is not None:
            # The thread may be reading right now, so it closes the file when it is done.
            self._pending.add_done_callback(self._close_file)
            self._pending = None
        else:
            self._close_file(None)

    def _close_file(self, done: asyncio.Future[list[FilePiece]] | None) -> None:
        if done is not None and not done.cancelled():
            done.exception()  # looks at the error, so that asyncio does not report it
        if self._blocks is not None:
            self._blocks.close()
            self._blocks = None

    def _read_ahead(self) -> None:
        """Start reading the next block, unless enough blocks are ready."""
        if self._pending is not None or len(self._ready) >= _BLOCKS_AHEAD:
            return
        if self._reading is None:
            if not self._unread:
                return
            self._reading = self._unread.popleft()
        split = self._reading
        self._pending = self.context.run_in_thread(lambda: self._next_block(split))

    def _next_block(self, split: FileSplit) -> list[FilePiece]:
        """Read the next block, in a thread. Nothing else uses the block reader meanwhile."""
        if self._blocks is None:
            self._blocks = self._source.open_split(split, self.context.options)
        pieces = self._blocks.next_block()
        if pieces[-1].last:
            self._blocks.close()
            self._blocks = None
        return pieces

    def _take_block(self) -> None:
        """Take over a block that has been read. An error is raised only after the blocks before it have
        been returned.
        """
        if self._pending is None or not self._pending.done():
            return
        if self._pending.exception() is not None and self._ready:
            return
        pieces = self._pending.result()
        split = self._reading
        assert split is not None  # for the type checker: something is being read
        self._pending = None
        if pieces[-1].last:
            self._reading = None
        self._ready.append((split, deque(pieces)))

    def _handle_bad(self, path: str, bad: list[BadRecord]) -> None:
        def first() -> tuple[str, str, str]:
            return (
                f"{path} {self._source.position_unit} {bad[0].offset}",
                bad[0].reason,
                bad[0].record,
            )

        def rejected() -> pa.RecordBatch:
            columns = [
                [path] * len(bad),
                [record.offset for record in bad],
                [record.reason for record in bad],
                [record.record for record in bad],
            ]
            arrays = [
                pa.array(values, field.type)
                for values, field in zip(columns, REJECTED_SCHEMA, strict=True)
            ]
            return pa.RecordBatch.from_arrays(arrays, schema=REJECTED_SCHEMA)

        self._bad.handle(len(bad), first, rejected)


def _parts(split: bytes) -> list[FileSplit]:
    """Return the splits that a reader reads one by one."""
    parts = msgspec.msgpack.decode(split, type=_AnySplit).parts
    return [msgspec.msgpack.decode(split, type=FileSplit)] if parts is None else parts


def _bytes_left(split: FileSplit) -> int:
    if is_compressed(split.path):
        return split.size_bytes
    return max(0, (split.size_bytes if split.end is None else split.end) - split.position)


def _name(split: FileSplit) -> str:
    """Return the name of the split in event time, which does not change with the position."""
    if split.row_group is not None:
        return f"{split.path} row group {split.row_group}"
    return split.path if split.end is None else f"{split.path} to byte {split.end}"


class ParquetOptions(TypedDict, total=False):
    """The keyword arguments of all sources of files, which `files_source` documents."""

    batch_rows: int
    discover_every: Duration | None
    on_bad_record: BadRecordPolicy
    storage_options: Mapping[str, str] | None


class JsonOptions(ParquetOptions, total=False):
    """The additional keyword arguments of sources of text files."""

    split_bytes: str | int


class CsvOptions(JsonOptions, total=False):
    """The additional keyword arguments of CSV sources."""

    delimiter: str
    header: bool
    null_values: Sequence[str]


@overload
def files_source(
    path: PathLike, *, format: FileFormat, schema: type[Record], **options: Unpack[CsvOptions]
) -> FileSource[Record]: ...
@overload
def files_source(
    path: PathLike,
    *,
    format: FileFormat,
    schema: ColumnsLike | None = ...,
    **options: Unpack[CsvOptions],
) -> FileSource: ...
def files_source(
    path: PathLike,
    *,
    format: FileFormat,
    schema: SchemaLike | None = None,
    discover_every: Duration | None = None,
    on_bad_record: BadRecordPolicy = "fail",
    batch_rows: int = BATCH_ROWS,
    split_bytes: str | int = SPLIT_BYTES,
    delimiter: str = ",",
    header: bool = True,
    null_values: Sequence[str] = ("",),
    storage_options: Mapping[str, str] | None = None,
) -> FileSource:
    """Return a source of files, which is bounded unless it has `discover_every`.

    CSV and JSON hold one record per line: values must not contain line breaks. Empty lines are skipped.
    Files that end in `.gz` are read as one split. Files must not change while a job reads them.

    Args:
        path: a file, a directory (with all below it), or a glob; local or s3://bucket/prefix.
        format: `csv`, `json` (one object per line), `parquet` or `text` (a line is a record of one column).
        schema: the columns to read: a Struct class, a `pyarrow.Schema` or {name: type}. Other columns of
            the files are skipped. It is needed for csv and json; for parquet the default is that of the
            first file, which is then read at once.
        discover_every: how often to look for new files, such as "10s"; each is read once, and the source
            never ends. None: only the files that are there at the start are read.
        on_bad_record: the treatment of unreadable records: `fail`, `drop` (counted in
            `headgate_source_record_errors_total`), or `side_output` (`rejected`).
        batch_rows: the most rows of a batch. Batches of long rows have fewer: about 1 MiB of text, or
            16 MiB of the columns of a Parquet file.
        split_bytes: the size of the parts into which a text file is cut.
        delimiter: the delimiter of CSV.
        header: whether CSV files begin with a line of column names. Otherwise their columns are in the
            order of the schema.
        null_values: unquoted texts of CSV that mean null.
        storage_options: `s3.endpoint` and the like, if they differ from the job's. Parquet without a
            `schema` is opened before there is a job, and so only with these and the environment.

    Raises:
        UsageError: an argument is wrong. Whether there are files at `path` is found out when the job
            starts.
    """
    text = TextOptions(delimiter, header, tuple(null_values))
    path = locations.address_of(path)
    check_count("batch_rows", batch_rows, 1)
    check_choice("format", format, FORMATS, "file format", "formats")
    policy = parse_policy(on_bad_record)
    split_bytes = parse_bytes("split_bytes", split_bytes)
    if len(text.delimiter) != 1 or not text.delimiter.isascii() or text.delimiter in '"\r\n\0':
        raise UsageError(
            f"must be one ASCII character delimiter=`{text.delimiter}`",
            fix='such as "," or ";" or "\\t"; not a quote, and no line break',
        )
    locations.parse_location(path)
    options = locations.check_storage_options(storage_options)
    every_ms = None
    if discover_every is not None:
        every_ms = parse_duration(discover_every, "discover_every")
        check_count("discover_every", every_ms, 1)
    if schema is None and format == "text":
        schema = LINES
    if schema is None:
        if format != "parquet":
            raise UsageError(
                f"{format} files carry no types: the source needs a schema path=`{path}`",
                fix='give schema=..., such as {"id": "int64", "name": "string"} or a Struct class',
            )
        first = _first_file(path, options, may_grow=every_ms is not None)
        store = locations.filesystem(locations.parse_location(path).scheme, options)
        schema = parquet_footer(store, first.path)[0].remove_metadata()
    arrow = to_schema(schema)
    if format == "text" and not (len(arrow) == 1 and can_encode("text", arrow.field(0).type)):
        raise UsageError(
            f"lines make one column of texts columns=`{', '.join(arrow.names)}`",
            fix='schema={"line": "string"}, or another format',
        )
    reading = Reading(policy, batch_rows, split_bytes, text)
    return FileSource(path, format, arrow, record_class(schema), reading, options, every_ms)


@overload
def csv_source(
    path: PathLike, schema: type[Record], **options: Unpack[CsvOptions]
) -> FileSource[Record]: ...
@overload
def csv_source(
    path: PathLike, schema: ColumnsLike, **options: Unpack[CsvOptions]
) -> FileSource: ...
@passes_on(CsvOptions, files_source)
def csv_source(path: PathLike, schema: SchemaLike, **options: Unpack[CsvOptions]) -> FileSource:
    """`files_source` for CSV."""
    return files_source(path, format="csv", schema=schema, **options)


@overload
def json_source(
    path: PathLike, schema: type[Record], **options: Unpack[JsonOptions]
) -> FileSource[Record]: ...
@overload
def json_source(
    path: PathLike, schema: ColumnsLike, **options: Unpack[JsonOptions]
) -> FileSource: ...
@passes_on(JsonOptions, files_source)
def json_source(path: PathLike, schema: SchemaLike, **options: Unpack[JsonOptions]) -> FileSource:
    """`files_source` for JSON lines."""
    return files_source(path, format="json", schema=schema, **options)


@overload
def parquet_source(
    path: PathLike, schema: type[Record], **options: Unpack[ParquetOptions]
) -> FileSource[Record]: ...
@overload
def parquet_source(
    path: PathLike, schema: ColumnsLike | None = ..., **options: Unpack[ParquetOptions]
) -> FileSource: ...
@passes_on(ParquetOptions, files_source)
def parquet_source(
    path: PathLike, schema: SchemaLike | None = None, **options: Unpack[ParquetOptions]
) -> FileSource:
    """`files_source` for Parquet."""
    return files_source(path, format="parquet", schema=schema, **options)


def _first_file(path: str, options: Mapping[str, str], *, may_grow: bool) -> locations.FileVersion:
    found = locations.find_files(path, options, may_grow=may_grow)
    if not found:
        raise UsageError(
            f"there is no file yet whose columns could be read path=`{path}`",
            fix='give schema=..., such as {"id": "int64", "name": "string"} or a Struct class',
        )
    return found[0]


def parquet_footer(store: pafs.FileSystem, path: str) -> tuple[pa.Schema, list[int]]:
    """Return the schema, and the number of rows of each row group."""
    try:
        with pq.ParquetFile(store.open_input_file(path)) as file:
            metadata = file.metadata
            counts = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
            return file.schema_arrow, counts
    except pa.ArrowInvalid as error:
        raise UsageError(
            f"not a Parquet file file=`{path}`: {error}",
            fix="a directory is read with all files below it; move the other files away, or give a glob",
        ) from error
    except (OSError, pa.ArrowException) as error:
        raise storage_error(path, error) from error
