"""A service of HTTP as a sink: some records a request, several requests at the same time.

Each request has a key of idempotence, which all its repeats have. At least once, a key is made for each
request of an attempt. Exactly once, records are staged in checkpoints, and the key is fixed with them: see
`functions/write_ahead.py`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import msgspec
import pyarrow as pa

from ...errors import JobError, StorageError, UsageError
from ...operators.async_calls.in_flight import RETRIES_COUNTER
from ...operators.base import OperatorContext
from ...operators.drops import DropKind
from ...operators.durations import Duration, parse_duration
from ...operators.functions.dead_letters import DROPPED_COUNTER, FAILED_COUNTER
from ...operators.origin import Origin, capture_origin
from ...operators.sink import (
    Guarantee,
    GuaranteeLike,
    Sink,
    SinkRun,
    SinkWriter,
    parse_guarantee,
    stream_columns,
)
from ...state.durable_files import sync
from ..arguments import check_choice, check_count, parse_bytes
from ..files.locations import (
    PathLike,
    address_of,
    check_directory,
    check_storage_options,
    filesystem,
    parse_location,
)
from ..formats.format import planning
from ..formats.text import JsonFormat
from ..functions.calling import CallBounds
from ..functions.write_ahead import BUFFER
from ..publishing import Publisher, publishing_writer
from .client import (
    HttpClient,
    HttpSettings,
    check_headers,
    check_reachable,
    check_service,
    http_settings,
)

Body = Literal["array", "lines", "object"]
OnRefused = Literal["fail", "drop", "dead_letters"]
Method = Literal["POST", "PUT", "PATCH"]
BODIES: Final[Mapping[Body, str]] = {
    "array": "application/json",
    "lines": "application/x-ndjson",
    "object": "application/json",
}
ON_REFUSED: Final[tuple[OnRefused, ...]] = ("fail", "drop", "dead_letters")
METHODS: Final[tuple[Method, ...]] = ("POST", "PUT", "PATCH")
REFUSALS: Final = frozenset({400, 413, 422})
"""The statuses that are about the records of a request, and not about its sender."""
TOO_LARGE: Final = 413
IN_PROGRESS: Final = frozenset({409})
"""The answer to a repeat while the service is still at the first request with its key."""
ROWS: Final = 500
KEY_HEADER: Final = "Idempotency-Key"


@dataclass(frozen=True, slots=True)
class HttpSinkSettings:
    """The settings of a sink.

    Attributes:
        http: of the requests.
        method: of the requests.
        body: the form of a request.
        bounds: of the requests.
        key_header: the header with the key of idempotence; None: none is sent.
        on_refused: what to do with records that the service refuses.
        dead_letters: where those go with `dead_letters`.
        storage_options: `s3.*` options for that, if they differ from the job's.
        buffer_bytes: exactly once: the most bytes that are staged between two checkpoints.
    """

    http: HttpSettings
    method: Method
    body: Body
    bounds: CallBounds
    key_header: str | None
    on_refused: OnRefused
    dead_letters: str
    storage_options: dict[str, str] = field(repr=False)
    buffer_bytes: int


class HttpSink(Sink):
    """One address."""

    guarantees = frozenset(Guarantee)
    needs_columns = True

    def __init__(self, settings: HttpSinkSettings, guarantee: Guarantee, origin: Origin) -> None:
        self.settings = settings
        self.guarantee = guarantee
        self.place = settings.http.shown
        self._origin = origin
        remote = settings.dead_letters and parse_location(settings.dead_letters).scheme != "file"
        self.extras = ("s3",) if remote else ()

    def bind(self, schema: pa.Schema | None) -> None:
        schema = stream_columns(schema, "requests")
        with planning():
            JsonFormat().check_output(schema)

    def writer(self) -> SinkWriter:
        settings = self.settings
        return publishing_writer(
            Poster(settings), settings.bounds, self.guarantee, settings.buffer_bytes, self._origin
        )

    def check_output(self, run: SinkRun) -> None:
        check_reachable(self.settings.http)

    def check_connection(self, options: Mapping[str, str]) -> str:
        settings = self.settings
        if settings.dead_letters:
            check_directory(settings.dead_letters, {**options, **settings.storage_options})
        return check_service(settings.http)

    def describe(self) -> str:
        return f"http({self.settings.http.shown})"


class Poster(Publisher):
    """Sends the records of one subtask."""

    def __init__(self, settings: HttpSinkSettings) -> None:
        super().__init__()
        self._settings = settings
        self._client: HttpClient | None = None

    async def open(self, context: OperatorContext) -> None:
        settings, metrics = self._settings, context.metrics
        self._context = context
        self._encode = JsonFormat().encoder(pa.schema([]), "")
        self._failed = metrics.counter(FAILED_COUNTER)
        self._dropped = metrics.counter(DROPPED_COUNTER)
        self._client = HttpClient(
            settings.http,
            context.clock,
            settings.bounds.max_in_flight,
            metrics.counter(RETRIES_COUNTER).inc,
            f"{context.run_id} {context.operator_name} {context.subtask_index}",
        )
        await self._client.open()

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    async def publish(self, data: pa.RecordBatch, key: str) -> None:
        """Send records until the service has taken them, or refused them.

        Raises:
            StorageError: the service does not answer.
            JobError: it does not take requests like these.
        """
        values = [value or b"" for value in self._encode(data)]
        if self._settings.body == "object":
            # A part has several records only where another setting had staged it.
            for number, value in enumerate(values):
                await self._post([value], key if len(values) == 1 else f"{key}-{number}")
        else:
            await self._post(values, key)

    async def _post(self, values: list[bytes], key: str) -> None:
        settings, client = self._settings, self._client
        assert client is not None
        headers = {"Content-Type": BODIES[settings.body]}
        if settings.key_header is not None:
            headers[settings.key_header] = key
        url = settings.http.url
        body = _body_of(settings.body, values)
        busy = IN_PROGRESS if settings.key_header is not None else frozenset()
        answer = await client.patient(settings.method, url, busy, data=body, headers=headers)
        if answer.good:
            return
        shown = client.shown_answer(answer)
        refused = answer.status in REFUSALS
        divides = answer.status == TOO_LARGE or settings.on_refused != "fail"
        if refused and divides and len(values) > 1:
            half = len(values) // 2
            await self._post(values[:half], f"{key}-0")
            await self._post(values[half:], f"{key}-1")
        elif refused and settings.on_refused != "fail":
            await self._put_aside(values, key, answer.status, shown)
        else:
            raise JobError(
                f"the service refuses a request url=`{settings.http.shown}` "
                f"records=`{len(values)}`: {shown}",
                fix='on_refused="dead_letters" puts records aside that a service refuses'
                if refused
                else "check the address, the method and the credentials",
            )

    async def _put_aside(self, values: list[bytes], key: str, status: int, reason: str) -> None:
        settings, context = self._settings, self._context
        if settings.on_refused == "dead_letters":
            letters = [
                Refused(
                    context.operator_name, settings.http.shown, status, reason, msgspec.Raw(value)
                )
                for value in values
            ]
            await asyncio.to_thread(
                write_refused,
                settings.dead_letters,
                {**context.options, **settings.storage_options},
                f"refused-{key}.json",
                letters,
            )
        else:
            context.drops.add(DropKind.REFUSED, len(values))
            if (samples := context.drops.samples) is not None:
                for value in values[: samples.room(DropKind.REFUSED)]:
                    samples.add(
                        DropKind.REFUSED, error=f"status {status}", error_text=reason, value=value
                    )
            self._dropped.inc(len(values))
        self._failed.inc(len(values))


def _body_of(body: Body, values: list[bytes]) -> bytes:
    if body == "array":
        return b"[" + b",".join(values) + b"]"
    if body == "lines":
        return b"".join(value + b"\n" for value in values)
    return values[0]


def http_sink(
    url: str,
    *,
    guarantee: GuaranteeLike = "at_least_once",
    method: Method = "POST",
    headers: Mapping[str, str] | None = None,
    body: Body = "array",
    rows: int | None = None,
    within: Duration = "1s",
    max_in_flight: int = 4,
    timeout: Duration = "30s",
    retries: int = 10,
    longest_pause: Duration = "30s",
    key_header: str | None = KEY_HEADER,
    on_refused: OnRefused = "fail",
    dead_letters: PathLike | None = None,
    buffer: str | int = BUFFER,
    ca: str | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> HttpSink:
    """Return a sink that sends records to a service, as JSON, some of them a request.

    A request is made again when there is no answer, and for the statuses 408, 425, 429, 500, 502, 503 and
    504: after pauses that grow from 0.5 s, with jitter, and not before the time in `Retry-After`. So is a
    repeat with a key for which the service answers 409, as it is still at the first request.

    Args:
        url: `http://` or `https://`, without credentials.
        guarantee: `at_least_once`; `exactly_once`, with a service that takes requests with the same key of
            idempotence once; or `none`.
        method: `POST`, `PUT` or `PATCH`.
        headers: further headers, such as {"Authorization": "env:TOKEN"}. `env:NAME` and `file:/path` are
            read on the workers.
        body: `array` (a JSON array of objects), `lines` (an object a line), or `object` (one record a
            request).
        rows: the most records of a request, 500 by default. A request has fewer at barriers, at the end,
            and after `within`.
        within: the longest time a record waits for others.
        max_in_flight: the most requests at the same time, per subtask. With more than 1 the order of
            requests is not kept. With `exactly_once` requests always follow each other.
        timeout: the longest time of one request.
        retries: how often a request is made again. Then the attempt fails.
        longest_pause: the longest pause before that, unless the service asks for a longer one.
        key_header: the header with the key of idempotence, which all repeats of a request have; None:
            none is sent.
        on_refused: what to do with records for which the service answers 400, 413 or 422: `fail`, `drop`
            and count them, or write them to `dead_letters`. The last two first divide the request until
            single records are refused.
        dead_letters: a directory, or s3://bucket/prefix, for files of refused records.
        buffer: with `exactly_once`: the most bytes staged between two checkpoints, as for
            `write_ahead_sink`.
        ca: the file of the authorities to trust; None: those of the system.
        storage_options: `s3.*` options for `dead_letters`, if they differ from the job's.

    Raises:
        UsageError: an argument is wrong. Whether the service can be reached is found when the job starts.
    """
    check_choice("method", method, METHODS, "method", "values")
    check_choice("body", body, tuple(BODIES), "body", "values")
    check_choice("on_refused", on_refused, ON_REFUSED, "on_refused", "values")
    if rows is None:
        rows = 1 if body == "object" else ROWS
    check_count("rows", rows, 1)
    if body == "object" and rows != 1:
        raise UsageError(f"an object is one record rows=`{rows}`", fix='body="array"')
    check_count("max_in_flight", max_in_flight, 1)
    if (on_refused == "dead_letters") != (dead_letters is not None):
        raise UsageError(
            'on_refused="dead_letters" and a directory dead_letters= belong together',
            fix='on_refused="dead_letters", dead_letters="refused"',
        )
    made = parse_guarantee(guarantee)
    if key_header is None and made is Guarantee.EXACTLY_ONCE:
        raise UsageError(
            "without a key of idempotence a repeated request cannot be told from a new one",
            fix="give key_header=, or another guarantee",
        )
    own = {"content-type", "content-length", "transfer-encoding", "host"}
    own |= set() if key_header is None else {key_header.lower()}
    buffer_bytes = parse_bytes("buffer", buffer)
    if key_header is not None:
        check_headers({key_header: ""}, frozenset())
    address = "" if dead_letters is None else address_of(dead_letters)
    if address:
        parse_location(address)
    http = http_settings(url, headers, ca, timeout, retries, longest_pause, frozenset(own))
    settings = HttpSinkSettings(
        http,
        method,
        body,
        CallBounds(rows, parse_duration(within, "within"), max_in_flight),
        key_header,
        on_refused,
        address,
        check_storage_options(storage_options),
        buffer_bytes,
    )
    return HttpSink(settings, made, capture_origin())


class Refused(msgspec.Struct, frozen=True):
    """A line of a file of refused records."""

    sink: str
    url: str
    status: int
    reason: str
    record: msgspec.Raw


def write_refused(
    address: str, options: Mapping[str, str], name: str, letters: list[Refused]
) -> None:
    """Write a file of refused records, durably; in a thread. A file of the same name is replaced.

    Args:
        address: a directory, or a prefix on S3.
        options: of the storage.
        name: of the file.
        letters: its lines.

    Raises:
        StorageError: it cannot be written.
    """
    data = b"".join(msgspec.json.encode(letter) + b"\n" for letter in letters)
    location = parse_location(address)
    try:
        if location.scheme == "file":
            _write_local(Path(location.path), name, data)
        else:
            store = filesystem(location.scheme, options)
            with store.open_output_stream(f"{location.path}/{name}") as stream:
                stream.write(data)
    except (OSError, pa.ArrowException) as error:
        raise StorageError(
            f"refused records cannot be written dead_letters=`{address}`: {error}",
            fix="check the address, and the right to write there",
        ) from error


def _write_local(directory: Path, name: str, data: bytes) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    draft = directory / f".{name}"
    with draft.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    draft.rename(directory / name)
    sync(directory)
