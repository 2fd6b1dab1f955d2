"""The connectors of headgate as cases of its conformance kit."""

from __future__ import annotations

import asyncio
import csv
import itertools
import json
import os
import sqlite3
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal
from urllib.parse import parse_qs, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable, write_deltalake

from headgate.connectors import (
    Epoch,
    collect,
    delta_sink,
    files_sink,
    files_source,
    from_list,
    function_sink,
    http_sink,
    http_source,
    iceberg_sink,
    kafka_sink,
    kafka_source,
    postgres_cdc_source,
    postgres_sink,
    postgres_source,
    sse_source,
    write_ahead_sink,
)
from headgate.connectors.kafka.transactions import TransactionClient
from headgate.connectors.postgres.sink import PostgresSink
from headgate.operators.elements import Batch, ColumnBatch, ObjectBatch
from headgate.operators.sink import GuaranteeLike, Sink
from headgate.operators.source import Source
from headgate.testing.connectors import (
    Case,
    Feature,
    Server,
    SinkCase,
    SourceCase,
    read_all,
)
from headgate.testing.proxy import CuttingProxy
from headgate.testing.servers.kafka import KafkaServer
from headgate.testing.servers.postgres import WITH_PASSWORD, PostgresServer
from headgate.testing.servers.process import HeldPort
from headgate.tests.support.http_stub import Asked, Given, HttpStub, TakenRecords, taking

if TYPE_CHECKING:
    from pyiceberg.table import Table

SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string())])
NOWHERE = "127.0.0.1:1"
"""An address at which nothing listens."""
_numbers = itertools.count()


class Rows:
    """Records of two columns, in batches of two."""

    def records(self) -> list[dict[str, Any]]:
        return [{"id": n, "name": f"näme {n}" if n % 3 else None} for n in range(12)]

    def batches(self, records: Sequence[Any]) -> list[Batch]:
        pairs = [list(records[at : at + 2]) for at in range(0, len(records), 2)]
        return [ColumnBatch(pa.RecordBatch.from_pylist(pair, schema=SCHEMA)) for pair in pairs]


class Proxied:
    """A case whose connectors connect to `port`, which is that of a proxy in the block of `cutting`."""

    port: int

    @contextmanager
    def cutting(self) -> Iterator[CuttingProxy]:
        own = self.port
        with CuttingProxy(own) as proxy:
            self.port = proxy.port
            try:
                yield proxy
            finally:
                self.port = own


class Directory:
    """A directory of its own for each check."""

    @contextmanager
    def place(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory() as directory:
            yield Path(directory)


class FileSource(Rows, Directory, SourceCase):
    """Files of one format, each `put` a file of its own."""

    format: ClassVar[str]
    features = frozenset({Feature.MISTAKES, Feature.CONNECTS})

    def put(self, place: Path, records: Sequence[Any]) -> None:
        if records:
            self.write(place / f"{next(_numbers):06}.{self.format}", records)

    def write(self, path: Path, records: Sequence[Any]) -> None:
        raise NotImplementedError

    def source(self, place: Path) -> Source:
        return self.files(place)

    def files(self, place: Path, **options: Any) -> Source:
        if not any(place.iterdir()):
            self.write(place / f"empty.{self.format}", [])
        given = {"schema": SCHEMA, "batch_rows": 1, **options}
        return files_source(str(place), format=self.format, **given)

    def mistakes(self, place: Path) -> Mapping[str, tuple[Source, str]]:
        nowhere = files_source(str(place / "no"), format=self.format, schema=SCHEMA)
        return {"a directory that does not exist": (nowhere, str(place / "no"))}


class TextSource(FileSource):
    features = frozenset({Feature.MISTAKES, Feature.CONNECTS, Feature.BAD_RECORDS})

    def source(self, place: Path) -> Source:
        return self.files(place, split_bytes="50b")

    def put_bad(self, place: Path) -> None:
        (place / f"{next(_numbers):06}.{self.format}").write_text("id,name\nnone,none\n")

    def tolerant(self, place: Path, on_bad_record: str) -> Source:
        return self.files(place, on_bad_record=on_bad_record)


class CsvSource(TextSource):
    format = "csv"

    def write(self, path: Path, records: Sequence[Any]) -> None:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["id", "name"], lineterminator="\n")
            writer.writeheader()
            writer.writerows(records)


class JsonSource(TextSource):
    format = "json"

    def write(self, path: Path, records: Sequence[Any]) -> None:
        path.write_text("".join(json.dumps(record) + "\n" for record in records))

    def put_bad(self, place: Path) -> None:
        (place / f"{next(_numbers):06}.json").write_text("{no JSON}\n")


class Line:
    """Records of one text each."""

    def records(self) -> list[dict[str, Any]]:
        return [{"line": f"line {n}, ä"} for n in range(12)]

    def batches(self, records: Sequence[Any]) -> list[Batch]:
        pairs = [list(records[at : at + 2]) for at in range(0, len(records), 2)]
        return [ColumnBatch(pa.RecordBatch.from_pylist(pair)) for pair in pairs]


class LinesSource(Line, TextSource):
    format = "text"

    def files(self, place: Path, **options: Any) -> Source:
        return super().files(place, schema=None, **options)

    def write(self, path: Path, records: Sequence[Any]) -> None:
        path.write_text("".join(f"{record['line']}\n" for record in records))

    def put_bad(self, place: Path) -> None:
        (place / f"{next(_numbers):06}.text").write_bytes(b"\xff\n")

    def mistakes(self, place: Path) -> Mapping[str, tuple[Source, str]]:
        nowhere = files_source(str(place / "no"), format="text")
        return {"a directory that does not exist": (nowhere, str(place / "no"))}


class ParquetSource(FileSource):
    format = "parquet"

    def write(self, path: Path, records: Sequence[Any]) -> None:
        table = pa.Table.from_pylist(list(records), schema=SCHEMA)
        pq.write_table(table, path, row_group_size=5)


class ListSource(Rows, SourceCase):
    """Records in the memory of the process that writes the job."""

    features = frozenset({Feature.LAG})

    @contextmanager
    def place(self) -> Iterator[list[Any]]:
        yield []

    def put(self, place: list[Any], records: Sequence[Any]) -> None:
        place.extend(records)

    def source(self, place: list[Any]) -> Source:
        return from_list(place, schema=SCHEMA, batch_rows=1)


class FileSinkCase(Rows, Directory, SinkCase):
    format: ClassVar[str]
    features = frozenset(
        {Feature.EXACTLY_ONCE, Feature.AT_LEAST_ONCE, Feature.PENDING, Feature.CONNECTS}
    )

    def sink(self, place: Path, guarantee: GuaranteeLike) -> Sink:
        return files_sink(str(place), format=self.format, guarantee=guarantee)

    def visible(self, place: Path) -> list[Any]:
        files = sorted(place.glob(f"[!.]*.{self.format}"))
        return [record for file in files for record in self.read(file)]

    def read(self, file: Path) -> list[Any]:
        raise NotImplementedError

    def pending(self, place: Path) -> Sequence[Any]:
        return [path for path in place.rglob("*") if path.is_file() and path.parent != place]


class CsvSink(FileSinkCase):
    format = "csv"

    def read(self, file: Path) -> list[Any]:
        with file.open(newline="") as lines:
            rows = list(csv.DictReader(lines))
        return [{"id": int(row["id"]), "name": row["name"] or None} for row in rows]


class JsonSink(FileSinkCase):
    format = "json"

    def read(self, file: Path) -> list[Any]:
        return [json.loads(line) for line in file.read_text().splitlines()]


class LinesSink(Line, FileSinkCase):
    format = "text"

    def read(self, file: Path) -> list[Any]:
        return [{"line": line} for line in file.read_text().splitlines()]


class ParquetSink(FileSinkCase):
    format = "parquet"

    def read(self, file: Path) -> list[Any]:
        return list(pq.read_table(file).to_pylist())


class CollectSink(Directory, SinkCase):
    """`collect` with a directory, of Python objects."""

    features = frozenset({Feature.EXACTLY_ONCE, Feature.AT_LEAST_ONCE})

    def records(self) -> list[Any]:
        return [(n, f"name {n}") for n in range(12)]

    def batches(self, records: Sequence[Any]) -> list[Batch]:
        return [ObjectBatch(list(records[at : at + 2])) for at in range(0, len(records), 2)]

    def sink(self, place: Path, guarantee: GuaranteeLike) -> Sink:
        return collect(path=str(place / "rows"), guarantee=guarantee)

    def visible(self, place: Path) -> list[Any]:
        return list(collect(path=str(place / "rows"), guarantee="exactly_once").rows)


class WriteAhead(Rows, Directory, SinkCase):
    """A function that writes a file for each call, under the identity of its records."""

    features = frozenset({Feature.EXACTLY_ONCE, Feature.AT_LEAST_ONCE})

    def sink(self, place: Path, guarantee: GuaranteeLike) -> Sink:
        def write(records: list[Any], epoch: Epoch) -> None:
            draft = place / f".{epoch.id}-{os.getpid()}-{threading.get_ident()}"
            draft.write_text(json.dumps([[each.id, each.name] for each in records]))
            draft.rename(place / f"{epoch.id}.json")

        return write_ahead_sink(write, guarantee=guarantee, rows=1)

    def visible(self, place: Path) -> list[Any]:
        files = [json.loads(file.read_text()) for file in sorted(place.glob("[!.]*.json"))]
        return [{"id": id_, "name": name} for records in files for id_, name in records]


class AsyncFunction(Rows, Directory, SinkCase):
    """An `async def` function of some records at a time."""

    features = frozenset({Feature.AT_LEAST_ONCE})

    def sink(self, place: Path, guarantee: GuaranteeLike) -> Sink:
        async def write(records: list[Any]) -> None:
            await asyncio.sleep(0)
            with (place / "lines").open("a") as file:
                file.writelines(json.dumps([each.id, each.name]) + "\n" for each in records)

        return function_sink(write, guarantee=guarantee, rows=3, max_in_flight=2)

    def visible(self, place: Path) -> list[Any]:
        file = place / "lines"
        lines = file.read_text().splitlines() if file.exists() else []
        return [dict(zip(["id", "name"], json.loads(line), strict=True)) for line in lines]


class HttpSinkCase(Rows, Proxied, SinkCase):
    """A service that takes each request with the same key once, and is killed now and then."""

    features = frozenset(
        {
            Feature.EXACTLY_ONCE,
            Feature.AT_LEAST_ONCE,
            Feature.SERVER,
            Feature.CUTS,
            Feature.MISTAKES,
            Feature.CONNECTS,
        }
    )
    secrets = ("s3cr3t", "not-for-you")
    unseen = frozenset({"a wrong token", "a wrong token, exactly once"})

    def __init__(self) -> None:
        self._held = HeldPort()
        self.port = self._held.number

    @contextmanager
    def place(self) -> Iterator[tuple[HttpStub, TakenRecords]]:
        with taking(port=self._held.number) as (stub, taken):
            taken.token = "Bearer s3cr3t"
            self.server = stub
            yield stub, taken

    def sink(self, place: tuple[HttpStub, TakenRecords], guarantee: GuaranteeLike) -> Sink:
        return self._sink(f"http://127.0.0.1:{self.port}", "Bearer s3cr3t", guarantee)

    def _sink(self, url: str, token: str, guarantee: GuaranteeLike) -> Sink:
        return http_sink(
            f"{url}/rows?with=not-for-you",
            headers={"Authorization": token},
            rows=1,
            longest_pause="10ms",
            retries=1000,
            guarantee=guarantee,
        )

    def visible(self, place: tuple[HttpStub, TakenRecords]) -> list[Any]:
        return place[1].records

    def mistakes(self, place: tuple[HttpStub, TakenRecords]) -> Mapping[str, tuple[Sink, str]]:
        url = place[0].url
        return {
            "no service": (
                self._sink(f"http://{NOWHERE}", "Bearer s3cr3t", "at_least_once"),
                NOWHERE,
            ),
            "a wrong token": (self._sink(url, "Bearer not-for-you", "at_least_once"), "status 401"),
            "a wrong token, exactly once": (
                self._sink(url, "Bearer not-for-you", "exactly_once"),
                "status 401",
            ),
        }


class HttpSourceCase(Rows, Proxied, SourceCase):
    """A service that gives the rows behind an id, some at a time."""

    features = frozenset(
        {Feature.LIVE, Feature.SERVER, Feature.CUTS, Feature.MISTAKES, Feature.CONNECTS}
    )
    secrets = ("s3cr3t", "not-for-you")
    unseen = frozenset({"a wrong token"})

    def __init__(self) -> None:
        self._held = HeldPort()
        self.port = self._held.number
        self.server = self.stub = HttpStub(lambda asked: (404, {}, b""), port=self.port)

    @contextmanager
    def place(self) -> Iterator[list[Any]]:
        rows: list[Any] = []

        def answer(asked: Asked) -> Given:
            if asked.headers.get("authorization") != "Bearer s3cr3t":
                return 401, {}, b"not you: " + asked.headers["authorization"].encode()
            return self.given(rows, asked)

        self.stub.answer = answer
        with self.stub:
            yield rows

    def given(self, rows: list[Any], asked: Asked) -> Given:
        after = int(parse_qs(urlsplit(asked.path).query).get("after", ["-1"])[0])
        found = [row for row in rows if row["id"] > after][:5]
        return 200, {}, json.dumps({"data": {"rows": found}}).encode()

    def put(self, place: list[Any], records: Sequence[Any]) -> None:
        place.extend(records)

    def source(self, place: list[Any], **options: Any) -> Source:
        given = {
            "headers": {"Authorization": "Bearer s3cr3t"},
            "items": "data.rows",
            "position": "id",
            "batch_rows": 1,
            "every": "10ms",
            "longest_pause": "10ms",
            "retries": 1000,
            "stop": "latest",
        }
        url = options.pop("url", f"http://127.0.0.1:{self.port}")
        return http_source(f"{url}/rows?with=not-for-you", SCHEMA, **(given | options))

    def live(self, place: list[Any]) -> Source:
        return self.source(place, stop=None)

    def mistakes(self, place: list[Any]) -> Mapping[str, tuple[Source, str]]:
        wrong = {"Authorization": "Bearer not-for-you"}
        return {
            "no service": (self.source(place, url=f"http://{NOWHERE}"), NOWHERE),
            "a wrong token": (self.source(place, headers=wrong), "status 401"),
        }


class SseSourceCase(HttpSourceCase):
    """A service that gives events, and ends the stream behind three of them; 204 when there are no more."""

    ends = True

    def given(self, rows: list[Any], asked: Asked) -> Given:
        after = int(asked.headers.get("last-event-id", "-1"))
        found = [row for row in rows if row["id"] > after][:3]
        if not found and self.ends:
            return 204, {}, b""
        events = [f"id: {row['id']}\ndata: {json.dumps(row)}\n\n".encode() for row in found]
        return 200, {"Content-Type": "text/event-stream"}, events

    def source(self, place: list[Any], **options: Any) -> Source:
        given = {
            "headers": {"Authorization": "Bearer s3cr3t"},
            "batch_rows": 1,
            "longest_pause": "10ms",
            "retries": 1000,
            "bounded": True,
        }
        url = options.pop("url", f"http://127.0.0.1:{self.port}")
        self.ends = True
        return sse_source(f"{url}/rows?with=not-for-you", SCHEMA, **(given | options))

    def live(self, place: list[Any]) -> Source:
        made = self.source(place, bounded=False)
        self.ends = False
        return made


# -- Kafka --------------------------------------------------------------------------------------------


def in_thread(work: Callable[[], Awaitable[Any]]) -> Any:
    """Run a coroutine from within a running loop, in a thread with a loop of its own."""
    found: list[Any] = []

    async def run() -> None:
        found.append(await work())

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    thread.join()
    return found[0]


class Topic:
    """A topic of its own for each check, on a broker that is killed now and then."""

    partitions = 1

    def __init__(self, broker: KafkaServer) -> None:
        self.broker = broker
        self.server: Server | None = broker
        self.bootstrap = broker.bootstrap

    @contextmanager
    def cutting(self) -> Iterator[CuttingProxy]:
        with CuttingProxy(self.broker.proxied_port, port=self.broker.proxy_port) as proxy:
            self.bootstrap = f"127.0.0.1:{proxy.port}"
            try:
                yield proxy
            finally:
                self.bootstrap = self.broker.bootstrap

    @contextmanager
    def place(self) -> Iterator[str]:
        name = f"case-{next(_numbers)}"
        self.broker.create_topic(name, self.partitions, {})
        yield name


class KafkaSource(Rows, Topic, SourceCase):
    """JSON in a topic of two partitions."""

    unseen = frozenset({"no broker"})  # a run finds it by the same call, which waits for 15 s
    partitions = 2
    features = frozenset(
        {
            *(Feature.LIVE, Feature.BAD_RECORDS, Feature.LAG),
            *(Feature.CONFIRMS, Feature.SERVER, Feature.CUTS, Feature.MISTAKES, Feature.CONNECTS),
        }
    )

    def put(self, place: str, records: Sequence[Any]) -> None:
        for partition in range(self.partitions):
            own = [json.dumps(record).encode() for record in records[partition :: self.partitions]]
            self.broker.produce(place, own, partition=partition)

    def put_bad(self, place: str) -> None:
        self.broker.produce(place, [b"{no JSON}"], partition=0)

    def source(self, place: str, **options: Any) -> Source:
        given = {
            "bootstrap": self.bootstrap,
            "schema": SCHEMA,
            "batch_rows": 1,
            "stop": "latest",
            "group": f"group-of-{place}",
        }
        return kafka_source(place, **(given | options))

    def live(self, place: str) -> Source:
        return self.source(place, stop=None)

    def tolerant(self, place: str, on_bad_record: str) -> Source:
        return self.source(place, on_bad_record=on_bad_record)

    def confirmed(self, place: str) -> int:
        from confluent_kafka import Consumer, TopicPartition

        group = {"bootstrap.servers": self.broker.bootstrap, "group.id": f"group-of-{place}"}
        reporter = Consumer({**group, "log_level": 0})
        try:
            partitions = [TopicPartition(place, number) for number in range(self.partitions)]
            found = reporter.committed(partitions, timeout=30)
        finally:
            reporter.close()
        return sum(max(each.offset, 0) for each in found)

    def mistakes(self, place: str) -> Mapping[str, tuple[Source, str]]:
        return {
            "a topic that does not exist": (self.source("no-such-topic"), "no-such-topic"),
            "no broker": (self.source(place, bootstrap=NOWHERE), NOWHERE),
        }


class KafkaSinkCase(Rows, Topic, SinkCase):
    """JSON in transactions, or at least once."""

    features = frozenset(
        {
            *(Feature.EXACTLY_ONCE, Feature.AT_LEAST_ONCE, Feature.PENDING),
            *(Feature.SERVER, Feature.CUTS, Feature.MISTAKES, Feature.CONNECTS),
        }
    )

    def sink(self, place: str, guarantee: GuaranteeLike) -> Sink:
        return kafka_sink(place, bootstrap=self.bootstrap, guarantee=guarantee)

    def visible(self, place: str) -> list[Any]:
        source = kafka_source(place, bootstrap=self.broker.bootstrap, schema=SCHEMA, stop="latest")
        return list(in_thread(lambda: read_all(source)))

    def pending(self, place: str) -> Sequence[Any]:
        """Return open transactions; one that is being ended is given a moment."""
        client = TransactionClient(self.broker.bootstrap, {})
        found: list[str] = []
        for _ in range(50):
            found = client.open_ids("hg-")
            if not found:
                break
            time.sleep(0.1)
        client.close()
        return found

    def mistakes(self, place: str) -> Mapping[str, tuple[Sink, str]]:
        wrong = kafka_sink(
            "no-such-topic", bootstrap=self.broker.bootstrap, guarantee="exactly_once"
        )
        return {"a topic that does not exist": (wrong, "no-such-topic")}


class StagedKafkaCase(KafkaSinkCase):
    """JSON that checkpoints stage."""

    features = KafkaSinkCase.features - {Feature.AT_LEAST_ONCE}

    def sink(self, place: str, guarantee: GuaranteeLike) -> Sink:
        return kafka_sink(
            place, bootstrap=self.bootstrap, guarantee=guarantee, transactions="staged"
        )


# -- PostgreSQL ---------------------------------------------------------------------------------------

PASSWORD = "no-password-of-ours"


class DatabaseTable(Proxied):
    """A table of its own for each check, on a server that is killed now and then."""

    columns = "id bigint PRIMARY KEY, name text"

    def __init__(self, database: PostgresServer) -> None:
        self.database = database
        self.server: Server | None = database
        self.port = database.port

    @property
    def dsn(self) -> str:
        return self.database.dsn.replace(str(self.database.port), str(self.port))

    @contextmanager
    def place(self) -> Iterator[str]:
        name = f"case_{next(_numbers)}"
        self.database.execute(f"CREATE TABLE {name} ({self.columns})")
        yield name
        self.database.execute(f"DROP TABLE {name}")

    @property
    def wrong_password(self) -> str:
        """An address with a password that the server refuses."""
        self.database.execute(
            f"DO $$ BEGIN CREATE ROLE {WITH_PASSWORD}; CREATE ROLE ann LOGIN PASSWORD 'right' "
            f"IN ROLE {WITH_PASSWORD}; EXCEPTION WHEN duplicate_object THEN NULL; END $$"
        )
        return self.database.dsn.replace("postgres@", f"ann:{PASSWORD}@")


class PostgresTableSource(Rows, DatabaseTable, SourceCase):
    """The rows of a table; a live source polls for new ones."""

    features = frozenset(
        {Feature.LIVE, Feature.SERVER, Feature.CUTS, Feature.MISTAKES, Feature.CONNECTS}
    )
    secrets = (PASSWORD,)

    def put(self, place: str, records: Sequence[Any]) -> None:
        for record in records:
            name = "NULL" if record["name"] is None else f"'{record['name']}'"
            self.database.execute(f"INSERT INTO {place} VALUES ({record['id']}, {name})")

    def source(self, place: str, **options: Any) -> Source:
        return postgres_source(self.dsn, place, batch_rows=1, **options)

    def live(self, place: str) -> Source:
        return self.source(place, incremental_by="id", lag="0ms", every="10ms")

    def mistakes(self, place: str) -> Mapping[str, tuple[Source, str]]:
        dsn = self.database.dsn
        nowhere = dsn.replace(str(self.database.port), "1")

        def wrong(dsn: str, table: str, **options: Any) -> Source:
            return postgres_source(dsn, table, schema=SCHEMA, **options)

        return {
            "a table that does not exist": (wrong(dsn, "no_such_table"), "no_such_table"),
            "no server": (wrong(nowhere, place), "127.0.0.1:1"),
            "a wrong password": (wrong(self.wrong_password, place), "password"),
            "a column that does not exist": (wrong(dsn, place, key="idd"), "idd"),
        }


class PostgresCdcSource(Rows, DatabaseTable, SourceCase):
    """Changes of a table, from a slot that is made with it."""

    features = frozenset(
        {
            *(Feature.LIVE, Feature.CONFIRMS, Feature.SERVER),
            *(Feature.CUTS, Feature.MISTAKES, Feature.CONNECTS),
        }
    )
    secrets = (PASSWORD,)
    snapshot: Literal["initial", "never"] = "never"

    def __init__(self, database: PostgresServer) -> None:
        super().__init__(database)
        self.places: list[int] = []
        """For each row that was put, a place in the log in its transaction."""

    @contextmanager
    def place(self) -> Iterator[str]:
        self.places = []
        with super().place() as name:
            self.source(name).splits(1)
            yield name
            self.database.execute(
                "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots "
                f"WHERE slot_name = '{name}' AND active"
            )
            while self.database.execute(
                f"SELECT 1 FROM pg_replication_slots WHERE slot_name = '{name}' AND active"
            ):
                time.sleep(0.01)
            self.database.execute(
                f"SELECT pg_drop_replication_slot('{name}')", f"DROP PUBLICATION {name}"
            )

    def records(self) -> list[dict[str, Any]]:
        return super().records()[:8]  # the more, the more often a slot is left and taken

    def put(self, place: str, records: Sequence[Any]) -> None:
        for record in records:
            name = "NULL" if record["name"] is None else f"'{record['name']}'"
            ((lsn,),) = self.database.execute(
                f"WITH put AS (INSERT INTO {place} VALUES ({record['id']}, {name}) RETURNING id) "
                "SELECT pg_current_wal_insert_lsn() - '0/0' FROM put"
            )
            self.places.append(int(lsn))

    def source(self, place: str, **options: Any) -> Source:
        given = {"slot": place, "stop": "latest", "batch_rows": 1, "snapshot": self.snapshot}
        made = postgres_cdc_source(self.dsn, place, **(given | options))
        return made.with_columns(["id", "name"])

    def live(self, place: str) -> Source:
        return self.source(place, stop=None)

    def confirmed(self, place: str) -> int:
        ((lsn,),) = self.database.execute(
            "SELECT confirmed_flush_lsn - '0/0' FROM pg_replication_slots "
            f"WHERE slot_name = '{place}'"
        )
        return sum(each < lsn for each in self.places)

    def mistakes(self, place: str) -> Mapping[str, tuple[Source, str]]:
        dsn, schema = self.database.dsn, SCHEMA
        nowhere = dsn.replace(str(self.database.port), "1")

        def wrong(dsn: str, table: str, **options: Any) -> Source:
            return postgres_cdc_source(dsn, table, slot="wrong", schema=schema, **options)

        return {
            "a table that does not exist": (wrong(dsn, "no_such_table"), "no_such_table"),
            "no server": (wrong(nowhere, place), "127.0.0.1:1"),
            "a wrong password": (wrong(self.wrong_password, place), "password"),
            "no slot": (wrong(dsn, place, publication=place, create=False), "no such slot"),
        }


class PostgresSinkCase(Rows, DatabaseTable, SinkCase):
    """Rows that are appended, staged or at least once."""

    columns = "id bigint, name text"
    features = frozenset(
        {
            *(Feature.EXACTLY_ONCE, Feature.AT_LEAST_ONCE, Feature.PENDING),
            *(Feature.SERVER, Feature.CUTS, Feature.MISTAKES, Feature.CONNECTS),
        }
    )
    secrets = (PASSWORD,)

    def sink(self, place: str, guarantee: GuaranteeLike) -> Sink:
        return self.table_sink(place, guarantee=guarantee)

    def table_sink(self, place: str, **options: Any) -> PostgresSink:
        return postgres_sink(self.dsn, place, **options)

    def visible(self, place: str) -> list[Any]:
        rows = self.database.execute(f"SELECT id, name FROM {place} ORDER BY id")
        return [{"id": number, "name": name} for number, name in rows]

    def pending(self, place: str) -> Sequence[Any]:
        return self.database.execute("SELECT relname FROM pg_class WHERE relname LIKE 'hg\\_%'")

    def mistakes(self, place: str) -> Mapping[str, tuple[Sink, str]]:
        dsn = self.database.dsn
        nowhere = dsn.replace(str(self.database.port), "1")
        return {
            "a table that does not exist": (postgres_sink(dsn, "no_such_table"), "no_such_table"),
            "no server": (postgres_sink(nowhere, place), "127.0.0.1:1"),
            "a wrong password": (postgres_sink(self.wrong_password, place), "password"),
        }


class DeltaSinkCase(Rows, Directory, SinkCase):
    """Appends to a Delta table."""

    features = frozenset({Feature.EXACTLY_ONCE, Feature.MISTAKES, Feature.CONNECTS})

    def sink(self, place: Path, guarantee: GuaranteeLike) -> Sink:
        if not DeltaTable.is_deltatable(str(place / "table")):
            write_deltalake(place / "table", SCHEMA.empty_table())
        return delta_sink(place / "table")

    def visible(self, place: Path) -> list[Any]:
        rows: list[Any] = DeltaTable(str(place / "table")).to_pyarrow_table().to_pylist()
        return rows

    def mistakes(self, place: Path) -> Mapping[str, tuple[Sink, str]]:
        other = pa.table({"id": pa.array([], pa.string()), "name": pa.array([], pa.string())})
        write_deltalake(place / "other", other)
        return {"another type": (delta_sink(place / "other"), "another type column=`id`")}


def let_readers_be(catalog: Path) -> None:
    """Create a SQLite database in which cursors that are still open do not hold up commits.

    Otherwise a cursor of the Iceberg library holds its lock until it is freed, which is seldom at once.
    """
    with closing(sqlite3.connect(catalog)) as connection:
        assert connection.execute("PRAGMA journal_mode=WAL").fetchall() == [("wal",)]


class IcebergSinkCase(Rows, Directory, SinkCase):
    """Appends to an Iceberg table whose catalog is a SQLite database."""

    features = frozenset({Feature.EXACTLY_ONCE, Feature.MISTAKES, Feature.CONNECTS})
    secrets = (PASSWORD,)

    @contextmanager
    def place(self) -> Iterator[Path]:
        with super().place() as place:
            let_readers_be(place / "catalog.db")
            yield place

    def catalog(self, place: Path) -> dict[str, str]:
        uri = f"sqlite:///{place}/catalog.db"
        return {"uri": uri, "warehouse": f"file://{place}/tables", "token": PASSWORD}

    def table(self, place: Path, name: str, schema: pa.Schema) -> Table:
        from pyiceberg.catalog import load_catalog

        with load_catalog("default", **self.catalog(place)) as catalog:
            catalog.create_namespace_if_not_exists("cases")
            return catalog.create_table_if_not_exists(f"cases.{name}", schema)

    def sink(self, place: Path, guarantee: GuaranteeLike) -> Sink:
        self.table(place, "table", SCHEMA)
        return iceberg_sink("cases.table", catalog=self.catalog(place))

    def visible(self, place: Path) -> list[Any]:
        return list(self.table(place, "table", SCHEMA).scan().to_arrow().to_pylist())

    def mistakes(self, place: Path) -> Mapping[str, tuple[Sink, str]]:
        other = pa.schema([("id", pa.string()), ("name", pa.string())])
        self.table(place, "other", other)
        catalog = self.catalog(place)
        wrong = iceberg_sink("cases.other", catalog=catalog)
        nowhere = {"uri": f"http://{NOWHERE}", "token": PASSWORD}
        return {
            "another type": (wrong, "another type column=`id`"),
            "no catalog": (iceberg_sink("cases.other", catalog=nowhere), NOWHERE),
        }


FILES_AND_MEMORY: dict[str, type[Case]] = {
    "csv_source": CsvSource,
    "json_source": JsonSource,
    "parquet_source": ParquetSource,
    "files_source (text)": LinesSource,
    "from_list": ListSource,
    "http_source": HttpSourceCase,
    "sse_source": SseSourceCase,
    "csv_sink": CsvSink,
    "json_sink": JsonSink,
    "parquet_sink": ParquetSink,
    "files_sink (text)": LinesSink,
    "collect": CollectSink,
    "function_sink": AsyncFunction,
    "write_ahead_sink": WriteAhead,
    "http_sink": HttpSinkCase,
}
TABLES: dict[str, type[Case]] = {"delta_sink": DeltaSinkCase, "iceberg_sink": IcebergSinkCase}
POSTGRES: dict[str, type[Case]] = {
    "postgres_source": PostgresTableSource,
    "postgres_cdc_source": PostgresCdcSource,
    "postgres_sink": PostgresSinkCase,
}
KAFKA: dict[str, type[Topic]] = {
    "kafka_source": KafkaSource,
    "kafka_sink": KafkaSinkCase,
    "kafka_sink (staged)": StagedKafkaCase,
}
