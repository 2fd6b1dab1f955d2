"""Decodes bytes and rows of files into record batches, and finds exactly the unreadable records.

Arrow converts a whole piece at once. Only if that fails is the piece halved, again and again, until each
bad record stands alone. So the fast and the slow path use one parser and agree on the bad records.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.json as pajson

from .json_layout import LayoutReader
from .json_objects import ObjectReader

Int64s: TypeAlias = npt.NDArray[np.int64]

EXCERPT_MAX_CHARS = 200
BOM = b"\xef\xbb\xbf"
"""Byte order mark: some programs begin a UTF-8 file with it."""
_NEWLINE, _RETURN, _QUOTE = 0x0A, 0x0D, b'"'
_OPEN, _CLOSE = 0x7B, 0x7D
_ONE_BLOCK = (
    1 << 30
)  # Arrow must not cut a piece again, as it would then parse line ends by other rules.


class Unreadable(Exception):
    """Raised if a piece cannot be converted; the text gives the reason."""


@dataclass(slots=True)
class BadRecord:
    """A record that could not be read: its position (byte or row number), the reason, and its text."""

    offset: int
    reason: str
    record: str


@dataclass(slots=True)
class Decoded:
    """The result of decoding a piece: its good records in order, and its bad ones."""

    batches: list[pa.RecordBatch] = field(default_factory=list)
    bad: list[tuple[int, str]] = field(default_factory=list)
    """(index of the record in the piece, reason)"""

    def batch(self) -> pa.RecordBatch | None:
        """Return all good records; None if there are none."""
        if len(self.batches) > 1:
            return pa.concat_batches(self.batches)
        return self.batches[0] if self.batches else None


def decode(count: int, convert: Callable[[int, int], pa.RecordBatch]) -> Decoded:
    """Convert records 0 to count - 1 of a piece; `convert(start, stop)` raises Unreadable if any is bad."""
    decoded = Decoded()
    # A stack takes the place of recursion: it has the pieces in order, with the next one on top.
    todo = [(0, count)] if count else []
    while todo:
        start, stop = todo.pop()
        try:
            decoded.batches.append(convert(start, stop))
        except Unreadable as error:
            if stop - start == 1:
                decoded.bad.append((start, str(error)))
                continue
            middle = (start + stop) // 2
            todo.append((middle, stop))
            todo.append((start, middle))
    return decoded


def excerpt(record: bytes | str) -> str:
    """Return a bounded, printable form of a record for a message."""
    text = record if isinstance(record, str) else record.decode(errors="backslashreplace")
    if len(text) > EXCERPT_MAX_CHARS:
        return f"{text[:EXCERPT_MAX_CHARS]}... ({len(text):,} characters)"
    return text


def reason_of(error: Exception) -> str:
    """Return one line of Arrow's error, without the row number, which counts within the piece."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    for noise in ("CSV parse error: ", "JSON parse error: ", "Row #1: ", " in row 0"):
        text = text.replace(noise, "")
    return text[:EXCERPT_MAX_CHARS]


class Lines:
    """Some lines of a file: their bytes, and the start and end of each line that is not empty.

    Ends lie behind the line break. Empty lines are not numbered.
    """

    __slots__ = ("_texts", "data", "ends", "starts")

    def __init__(
        self, data: bytes, starts: Int64s, ends: Int64s, texts: Sequence[bytes] | None = None
    ) -> None:
        """Make lines.

        Args:
            data: their bytes.
            starts: of the lines in `data`.
            ends: of the lines in `data`.
            texts: the lines one by one, with or without their line breaks, if they are known.
        """
        self.data = data
        self.starts = starts
        self.ends = ends
        self._texts = texts

    @classmethod
    def split(cls, data: bytes) -> Lines:
        """Return all lines of `data`, of which the last one may lack its line break."""
        ends = line_ends(data)
        if data and (not len(ends) or ends[-1] != len(data)):
            ends = np.append(ends, len(data))
        starts = np.concatenate([ends[:0], [0], ends[:-1]])[: len(ends)]
        sizes = ends - starts
        filled = sizes > 2
        for index in np.flatnonzero(~filled).tolist():
            filled[index] = bool(data[starts[index] : ends[index]].strip(b"\r\n"))
        return cls(data, starts[filled], ends[filled])

    def __len__(self) -> int:
        return len(self.starts)

    def part(self, start: int, stop: int) -> Lines:
        """Return lines start to stop - 1 without copying them."""
        texts = None if self._texts is None else self._texts[start:stop]
        return Lines(self.data, self.starts[start:stop], self.ends[start:stop], texts)

    def texts(self) -> Sequence[bytes]:
        """Return the lines one by one, with or without their line breaks."""
        if self._texts is None:
            places = zip(self.starts.tolist(), self.ends.tolist(), strict=True)
            return [self.data[start:end] for start, end in places]
        return self._texts

    def line(self, index: int) -> bytes:
        """Return line `index` without its line break."""
        return self.data[self.starts[index] : self.ends[index]].rstrip(b"\r\n")

    def view(self) -> memoryview:
        """Return the bytes of all these lines, including empty lines between them."""
        return memoryview(self.data)[self.starts[0] : self.ends[-1]]


def line_ends(data: bytes) -> Int64s:
    """Return the positions behind all line breaks."""
    return np.flatnonzero(np.frombuffer(data, np.uint8) == _NEWLINE) + 1


class CsvDecoder:
    """Converts lines of CSV: one record per line, no line breaks within values."""

    def __init__(
        self,
        schema: pa.Schema,
        header: Sequence[str],
        delimiter: str,
        null_values: Sequence[str],
    ) -> None:
        self._schema = schema
        self._read = pacsv.ReadOptions(
            column_names=list(header), use_threads=False, block_size=_ONE_BLOCK
        )
        self._parse = pacsv.ParseOptions(delimiter=delimiter)
        self._convert = pacsv.ConvertOptions(
            column_types=schema,
            include_columns=schema.names,
            null_values=list(null_values),
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        )

    def __call__(self, lines: Lines) -> pa.RecordBatch:
        view = lines.view()
        codes = np.frombuffer(view, np.uint8)
        returns = np.flatnonzero(codes[:-1] == _RETURN)
        if codes[-1] == _RETURN or (codes[returns + 1] != _NEWLINE).any():
            # Arrow would take it for a line break, and then rows would not correspond to lines.
            raise Unreadable("a carriage return within a record")
        table = self._rows(view)
        last = lines.line(len(lines) - 1)
        # A quote that is never closed joins its line to the next one, which gives too few rows. But the
        # end of the data closes it silently, so test its effect on a second line.
        if last.count(_QUOTE) % 2 and self._rows(last + b"\n" + last + b"\n").num_rows != 2:
            raise Unreadable("a quoted value does not end on its line")
        return _batch_of(table.columns, self._schema, len(lines))

    def _rows(self, data: bytes | memoryview) -> pa.Table:
        try:
            return pacsv.read_csv(
                pa.BufferReader(pa.py_buffer(data)),
                read_options=self._read,
                parse_options=self._parse,
                convert_options=self._convert,
            )
        except pa.ArrowException as error:
            raise Unreadable(reason_of(error)) from error


class JsonDecoder:
    """Converts lines of JSON objects. Missing fields are null; fields not in the schema are skipped."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._objects = ObjectReader(schema)
        self._layout = LayoutReader(schema)
        self._read = pajson.ReadOptions(use_threads=False, block_size=_ONE_BLOCK)
        # Columns are read as nullable; missing values are reported afterwards, with a clear reason.
        self._parse = pajson.ParseOptions(
            explicit_schema=pa.schema([(field.name, _json_type(field.type)) for field in schema]),
            unexpected_field_behavior="ignore",
        )

    def __call__(self, lines: Lines) -> pa.RecordBatch:
        if self._objects.may_read(len(lines)):
            batch = self._objects.read(lines.view(), lines.texts())
        else:
            batch = self._layout.read(lines.data, lines.starts, lines.ends)
        return self._parsed(lines) if batch is None else batch

    def _parsed(self, lines: Lines) -> pa.RecordBatch:
        # If each line begins and ends like an object, no record contains a line break (strings must not
        # contain one). As many rows as lines then means one record per line.
        if not _are_braced(lines):
            for start, stop in zip(lines.starts.tolist(), lines.ends.tolist(), strict=True):
                line = lines.data[start:stop].strip()
                if not (line.startswith(b"{") and line.endswith(b"}")):
                    raise Unreadable("not a JSON object on one line")
        view = lines.view()
        try:
            str(view, "utf-8")
            table = pajson.read_json(
                pa.BufferReader(pa.py_buffer(view)),
                read_options=self._read,
                parse_options=self._parse,
            )
            columns = [table.column(field.name).cast(field.type) for field in self._schema]
        except UnicodeDecodeError as error:
            raise Unreadable("not valid UTF-8") from error
        except pa.ArrowException as error:
            raise Unreadable(reason_of(error)) from error
        return _batch_of(columns, self._schema, len(lines))


class TextDecoder:
    """Takes each line as the value of the only column, without its line break."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema

    def __call__(self, lines: Lines) -> pa.RecordBatch:
        codes = np.frombuffer(lines.data, np.uint8)
        ends = lines.ends - (codes[lines.ends - 1] == _NEWLINE)
        ends = ends - (
            codes[ends - 1] == _RETURN
        )  # lines are not empty, so this is never before a start
        data = lines.data
        texts = [data[s:e] for s, e in zip(lines.starts.tolist(), ends.tolist(), strict=True)]
        try:
            column = pa.array(texts, pa.large_binary()).cast(pa.large_string())
            column = column.cast(self._schema.field(0).type)
        except pa.ArrowException as error:
            raise Unreadable("not valid UTF-8") from error
        return pa.RecordBatch.from_arrays([column], schema=self._schema)


def _are_braced(lines: Lines) -> bool:
    """Return True if each line begins with `{` and ends with `}`, without white space around them."""
    codes = np.frombuffer(lines.data, np.uint8)
    last = lines.ends - 1
    last = last - (codes[last] == _NEWLINE)
    return bool((codes[lines.starts] == _OPEN).all() and (codes[last] == _CLOSE).all())


def cast_rows(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return rows of a Parquet file cast to `schema`; raises Unreadable if a value does not fit."""
    try:
        columns = [batch.column(column.name).cast(column.type) for column in schema]
    except pa.ArrowException as error:
        raise Unreadable(reason_of(error)) from error
    return _with_values(columns, schema)


def _json_type(type_: pa.DataType) -> pa.DataType:
    """Return the type that Arrow's JSON reader must use for a column of this type: it takes dates for
    numbers.
    """
    return pa.timestamp("s") if pa.types.is_date(type_) else type_


def _batch_of(columns: Sequence[pa.ChunkedArray], schema: pa.Schema, rows: int) -> pa.RecordBatch:
    if any(len(column) != rows for column in columns):
        raise Unreadable("a record must be exactly one line")
    return _with_values([column.combine_chunks() for column in columns], schema)


def _with_values(columns: list[pa.Array], schema: pa.Schema) -> pa.RecordBatch:
    for column, values in zip(schema, columns, strict=True):
        if not column.nullable and values.null_count:
            raise Unreadable(f"no value for column `{column.name}`")
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def parse_header(line: bytes, delimiter: str) -> list[str]:
    """Return the column names in the first line of a CSV file.

    Raises:
        Unreadable: the line contains a carriage return, or a name is too long.
    """
    text = line.removeprefix(BOM).decode(errors="replace").rstrip("\r\n")
    try:
        return next(csv.reader(io.StringIO(text), delimiter=delimiter), [])
    except csv.Error as error:
        raise Unreadable(str(error)) from error
