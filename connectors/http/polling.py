"""A service of HTTP as a source: it is asked at intervals for the records after the last one."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec
import pyarrow as pa

from ...errors import SourceError, UsageError
from ...operators.durations import Duration, parse_duration
from ...operators.schema import SchemaLike, record_class, to_schema
from ...operators.source import Source, SourceReader
from ..arguments import check_count, parse_bytes
from ..fetched_splits import OneSplit
from ..formats.text import JsonFormat
from .client import HttpClient, HttpSettings, check_reachable, check_service, http_settings
from .reader import HttpReader, decoded, refused, value_of

ANSWER: Final = "32mb"
_OWN: Final = frozenset({"accept", "host"})


@dataclass(frozen=True, slots=True)
class PollSettings:
    """The settings of a source.

    Attributes:
        http: of the requests.
        every_ms: the pause between two requests, unless there is more to read.
        position: the column whose value says which records come after a record; None: none does.
        parameter: the parameter of the query with that value.
        start: its value in the first request; None: the request has none.
        items: the fields that lead to the array of records in an answer.
        bounded: the source ends when there is nothing more to read.
        batch_rows: the most rows of a batch.
        answer_bytes: the most bytes of an answer.
    """

    http: HttpSettings
    every_ms: int
    position: str | None
    parameter: str
    start: str | int | None
    items: tuple[str, ...]
    bounded: bool
    batch_rows: int
    answer_bytes: int


class HttpSource(Source[Any]):
    """The answers of one address."""

    def __init__(
        self, settings: PollSettings, schema: pa.Schema, row_type: type[Any] | None
    ) -> None:
        self.settings = settings
        self.schema = schema
        self.row_type = row_type
        self.bounded = settings.bounded
        self.replays = settings.position is not None
        self._read = schema
        """The columns that are decoded."""

    def check_connection(self, options: Mapping[str, str]) -> str:
        return check_service(self.settings.http)

    def splits(self, parallelism: int) -> list[bytes]:
        check_reachable(self.settings.http)
        return [msgspec.msgpack.encode(OneSplit(self.settings.start))]

    def reader(self) -> SourceReader:
        assert self.schema is not None
        return PollingReader(self.settings, self._read, self.schema.names)

    def with_columns(self, columns: Sequence[str]) -> HttpSource:
        # At least one column stays: a batch without columns has no rows to count.
        fields = [field for field in self._read if field.name in columns] or [self._read.field(0)]
        names = {self.settings.position, *(field.name for field in fields)}
        narrow = copy.copy(self)
        narrow.schema = pa.schema(fields)
        narrow._read = pa.schema([field for field in self._read if field.name in names])
        narrow.row_type = self.row_type if len(fields) == len(self._read) else None
        return narrow

    def describe(self) -> str:
        return f"http({self.settings.http.shown})"


class PollingReader(HttpReader):
    """Asks again and again."""

    def __init__(self, settings: PollSettings, schema: pa.Schema, columns: list[str]) -> None:
        super().__init__(settings.http, "requests")
        self._settings = settings
        self._columns = columns
        self._decode = JsonFormat().decoder(schema)

    async def read(self, client: HttpClient, position: str | int | None) -> None:
        settings = self._settings
        while True:
            payloads = await self._ask(client, position)
            for start in range(0, len(payloads), settings.batch_rows):
                some = payloads[start : start + settings.batch_rows]
                data = decoded(some, self._decode, settings.http.shown)
                position = self._after(data, position)
                await self.hand_on(data.select(self._columns), position)
            more = bool(payloads) and settings.position is not None
            if settings.bounded and not more:
                return
            if not more:
                await asyncio.sleep(settings.every_ms / 1000)

    async def _ask(self, client: HttpClient, position: str | int | None) -> list[bytes]:
        settings = self._settings
        answer = await client.patient(
            "GET",
            settings.http.url,
            bytes_max=settings.answer_bytes + 1,
            headers={"Accept": "application/json, application/x-ndjson"},
            params={} if position is None else {settings.parameter: str(position)},
        )
        if answer.status in (204, 304):
            return []
        if not answer.good:
            raise refused(client, client.shown_answer(answer))
        if len(answer.body) > settings.answer_bytes:
            raise SourceError(
                f"an answer is too large url=`{settings.http.shown}` "
                f"answer_bytes=`{settings.answer_bytes}`",
                fix="ask for fewer records at a time, or give http_source a larger buffer=",
            )
        try:
            return _payloads(answer.body, settings.items)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise SourceError(
                f"an answer is no array of records url=`{settings.http.shown}`: {error}",
                fix="items= names the field with the array, such as `data.items`",
            ) from None

    def _after(self, data: pa.RecordBatch, before: str | int | None) -> str | int | None:
        """Return the position of the last of some records.

        Raises:
            SourceError: it is not behind the position before, so records would be read again and again.
        """
        column = self._settings.position
        if column is None:
            return None
        shown = self._settings.http.shown
        values = [value_of(each, column, shown) for each in data.column(column).to_pylist()]
        for value in values:
            numbers = isinstance(before, int) and isinstance(value, int)
            if value == before or (numbers and not value > before):  # type: ignore[operator]
                raise SourceError(
                    f"positions do not ascend url=`{shown}` column=`{column}`: "
                    f"`{value}` comes after `{before}`",
                    fix="the service must give the records behind a position only, each with another "
                    "position, in their order",
                )
            before = value
        return before


def _payloads(body: bytes, items: tuple[str, ...]) -> list[bytes]:
    """Return the records of an answer: those of an array, or the lines of a text."""
    body = body.strip()
    if not body:
        return []
    if not items and not body.startswith(b"["):
        return [line for line in body.splitlines() if line.strip()]
    found = msgspec.Raw(body)
    for name in items:
        fields = msgspec.json.decode(found, type=dict[str, msgspec.Raw])
        if name not in fields:
            raise msgspec.ValidationError(f"it has no field `{name}`")
        found = fields[name]
    records = msgspec.json.decode(found, type=list[msgspec.Raw])
    return [bytes(record) for record in records]


def http_source(
    url: str,
    schema: SchemaLike,
    *,
    position: str | None = None,
    parameter: str = "after",
    start: str | int | None = None,
    every: Duration = "10s",
    stop: Literal["latest"] | None = None,
    items: str = "",
    headers: Mapping[str, str] | None = None,
    timeout: Duration = "30s",
    retries: int = 10,
    longest_pause: Duration = "30s",
    batch_rows: int = 1024,
    buffer: str | int = ANSWER,
    ca: str | None = None,
) -> HttpSource:
    """Return a source that asks a service for records at intervals.

    An answer is a JSON array of objects, or an object a line. With `position` a request asks for the
    records behind the last one, and every record is read exactly once, also after failures. Without it each
    answer is taken as new records, and a failure loses those since the last checkpoint.

    Args:
        url: `http://` or `https://`, without credentials.
        schema: the columns; other fields of the objects are skipped.
        position: a column of whole numbers or texts that tells each record from the others. The service
            must give the records behind such a value, in the same order every time.
        parameter: the parameter of the query with the position of the last record.
        start: the position in the first request; None: the parameter is left out.
        every: the pause between two requests. With `position` there is none while there are records.
        stop: `latest`: end at the first answer without records, and without `position` after one answer.
        items: the field of an answer with the array, such as `data.items`; by default the answer is it.
        headers: further headers. `env:NAME` and `file:/path` are read on the workers.
        timeout: the longest time of one request.
        retries: how often a request is made again, as by `http_sink`. Then the attempt fails.
        longest_pause: the longest pause before that, unless the service asks for a longer one.
        batch_rows: the most rows of a batch.
        buffer: the most bytes of an answer.
        ca: the file of the authorities to trust; None: those of the system.

    Raises:
        UsageError: an argument is wrong. Whether the service can be reached is found when the job starts.
    """
    columns = to_schema(schema)
    if position is not None:
        if position not in columns.names:
            raise UsageError(
                f"no such column position=`{position}`", fix=f"one of: {', '.join(columns.names)}"
            )
        kind = columns.field(position).type
        if not (pa.types.is_integer(kind) or kind in (pa.string(), pa.large_string())):
            raise UsageError(
                f"a position is a whole number or a text position=`{position}: {kind}`",
                fix="use another column, such as the id of the records",
            )
    elif start is not None:
        raise UsageError("start is a position", fix='position="id"')
    if stop not in (None, "latest"):
        raise UsageError(f"not a place to stop stop=`{stop}`", fix='stop="latest", or none')
    if not parameter:
        raise UsageError("a parameter has a name", fix='parameter="after"')
    check_count("batch_rows", batch_rows, 1)
    buffer_bytes = parse_bytes("buffer", buffer)
    every_ms = parse_duration(every, "every")
    check_count("every", every_ms, 1)
    settings = PollSettings(
        http_settings(url, headers, ca, timeout, retries, longest_pause, _OWN),
        every_ms,
        position,
        parameter,
        start,
        tuple(items.split(".")) if items else (),
        stop is not None,
        batch_rows,
        buffer_bytes,
    )
    return HttpSource(settings, columns, record_class(schema))
