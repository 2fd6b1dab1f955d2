"""The systems whose connectors `connectors.py` measures: how each starts, and its sinks and sources."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
from kafka_topics import SCHEMA, USERS

from headgate import connectors as hc
from headgate.operators.sink import Sink
from headgate.operators.source import Source

FIELDS: dict[str, Any] = {
    "id": hc.sequence(),
    "user": hc.choice([f"user-{number:04}" for number in range(USERS)]),
    "price": hc.choice([number / 4 for number in range(1000)]),
    "ms": hc.sequence(),
    "page": hc.choice([f"/shop/item-{number:05}/view" for number in range(100)]),
}
"""The records of `kafka_topics.message`, of about 90 bytes as JSON."""
LINE = {"line": hc.pattern(prefix="x" * 83, distinct=1_000_000)}
"""A text of about 90 bytes."""
ARROW = pa.schema(
    [
        ("id", pa.int64()),
        ("user", pa.string()),
        ("price", pa.float64()),
        ("ms", pa.int64()),
        ("page", pa.string()),
    ]
)
_numbers = itertools.count()


@dataclass(frozen=True)
class System:
    """A system that has been started.

    Attributes:
        place: returns a new place, such as a topic, for this many records.
        sinks: by name, what writes to a place.
        sources: by name, what reads what the first of the sinks has written, or the place has by itself.
        fields: the columns of the records.
    """

    place: Callable[[int], Any]
    sinks: Mapping[str, Callable[[Any], Sink]] = field(default_factory=dict)
    sources: Mapping[str, Callable[[Any], Source]] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=lambda: FIELDS)


Start: TypeAlias = Callable[[Path, int], AbstractContextManager[System]]


def _name(_rows: int = 0) -> str:
    return f"bench{next(_numbers)}"


@contextmanager
def columns(directory: Path, rows: int) -> Iterator[System]:
    yield System(
        lambda count: count,
        {"blackhole": lambda _: hc.blackhole()},
        {"generator": lambda count: hc.generator(FIELDS, rows=count, splits=1)},
    )


@contextmanager
def objects(directory: Path, rows: int) -> Iterator[System]:
    items = [{"id": n, "user": "u", "price": n / 4, "ms": n, "page": "p"} for n in range(rows)]
    yield System(
        lambda count: count,
        {
            "collect": lambda _: hc.collect(),
            "function_sink": lambda _: hc.function_sink(_forget),
            "write_ahead_sink": lambda _: hc.write_ahead_sink(
                _forget_all, guarantee="exactly_once"
            ),
        },
        {"from_list": lambda count: hc.from_list(items[:count], schema=ARROW)},
    )


@contextmanager
def console(directory: Path, rows: int) -> Iterator[System]:
    """Standard input is a file, and what is printed is thrown away."""

    def place(count: int) -> Path:
        path = directory / _name()
        path.write_text("".join(f"{'x' * 83}{number:07}\n" for number in range(count)))
        return path

    def stdin(path: Path) -> Source:
        sys.stdin = path.open()
        return hc.stdin_source()

    directory.mkdir()
    own = sys.stdin
    with Path(os.devnull).open("w") as nothing, contextlib.redirect_stdout(nothing):
        try:
            yield System(place, {"print_sink": lambda _: hc.print_sink()}, {"stdin_source": stdin})
        finally:
            sys.stdin = own


@contextmanager
def hybrid(directory: Path, rows: int) -> Iterator[System]:
    """The history and the live source have half of the records each."""

    def half(count: int) -> Source:
        return hc.generator(FIELDS, rows=(count + 1) // 2, splits=1)

    yield System(
        lambda count: count,
        {"blackhole": lambda _: hc.blackhole()},
        {"hybrid_source": lambda count: hc.hybrid_source(half(count), half(count))},
    )


def _forget(_record: Any) -> None:
    pass


def _forget_all(_records: Any, _epoch: Any) -> None:
    pass


@contextmanager
def spark(directory: Path, rows: int) -> Iterator[System]:
    """The query makes the records of `kafka_topics.message`; what it takes is part of the figures."""
    query = (
        "SELECT id, format_string('user-%04d', id % {users}) AS user, id % 1000 / 4D AS price, id AS ms, "
        "format_string('/shop/item-%05d/view', id % 100000) AS page FROM range(0, {count}, 1, 8)"
    )

    def source(count: int) -> Source:
        return hc.spark_source(
            sql=query.format(users=USERS, count=count),
            schema=SCHEMA,
            conf={"spark.driver.memory": "1g"},
        )

    yield System(lambda count: count, sources={"spark_source": source})


@contextmanager
def ray_dataset(directory: Path, rows: int) -> Iterator[System]:
    """Ray makes the same records. It and its workers are there before the first run."""
    from headgate.runtime.cluster.embedded import embedded_ray, prepare_environment

    def records(count: int) -> Any:
        import ray.data

        ray.data.DataContext.get_current().enable_progress_bars = False
        numbers = ray.data.range(count, override_num_blocks=8)
        tasks = ray.data.TaskPoolStrategy(2)
        return numbers.map_batches(_with_columns, batch_format="pyarrow", compute=tasks)

    prepare_environment()
    with embedded_ray():
        records(rows).materialize()
        yield System(
            lambda count: count,
            sources={
                "ray_dataset_source": lambda count: hc.ray_dataset_source(
                    lambda: records(count), SCHEMA
                )
            },
        )


def _with_columns(numbers: pa.Table) -> pa.Table:
    """Return the records of `kafka_topics.message` with these numbers."""
    ids = numbers["id"].to_numpy()
    made = {
        "id": ids,
        "user": [f"user-{number % USERS:04}" for number in ids],
        "price": ids % 1000 / 4,
        "ms": ids,
        "page": [f"/shop/item-{number % 100_000:05}/view" for number in ids],
    }
    return pa.table(made, schema=ARROW)


def _files(format: Any) -> Start:
    @contextmanager
    def files(directory: Path, rows: int) -> Iterator[System]:
        text = format == "text"
        schema = None if text else SCHEMA
        name = "files_{} (text)" if text else f"{format}_{{}}"
        yield System(
            lambda _: str(directory / _name()),
            {
                f"{name.format('sink')}, exactly once": lambda path: hc.files_sink(
                    path, format=format, guarantee="exactly_once"
                )
            },
            {
                name.format("source"): lambda path: hc.files_source(
                    path, format=format, schema=schema
                )
            },
            LINE if text else FIELDS,
        )

    return files


@contextmanager
def _programs(rows: int) -> Iterator[dict[str, int]]:
    command = [sys.executable, str(Path(__file__).with_name("connector_programs.py"))]
    process = subprocess.Popen(
        [*command, "1", str(rows)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        yield json.loads(process.stdout.readline())
    finally:
        process.stdin.close()
        process.wait(30)
        process.stdout.close()


@contextmanager
def sockets(directory: Path, rows: int) -> Iterator[System]:
    with _programs(rows) as ports:
        yield System(
            lambda count: count,
            {"socket_sink": lambda _: hc.socket_sink(ports["takes"])},
            {"socket_source": lambda count: hc.socket_source(ports[f"sends-{count}"])},
            LINE,
        )


@contextmanager
def http(directory: Path, rows: int) -> Iterator[System]:
    with _programs(rows) as ports:
        url = f"http://127.0.0.1:{ports['http']}"

        def polls(count: int) -> Source:
            return hc.http_source(
                f"{url}/rows/{count}", SCHEMA, position="id", stop="latest", every="10ms"
            )

        yield System(
            lambda count: count,
            {
                f"http_sink, {shown}": lambda _, level=level: hc.http_sink(  # type: ignore[misc]
                    f"{url}/take", rows=1_000, guarantee=level
                )
                for shown, level in LEVELS.items()
            },
            {
                "http_source": polls,
                "sse_source": lambda count: hc.sse_source(
                    f"{url}/events/{count}", SCHEMA, bounded=True
                ),
                "websocket_source": lambda count: hc.websocket_source(
                    f"ws://127.0.0.1:{ports['websocket']}/{count}", SCHEMA, bounded=True
                ),
            },
        )


LEVELS: dict[str, Any] = {"at least once": "at_least_once", "exactly once": "exactly_once"}


def _both(name: str, sink: Callable[..., Any]) -> dict[str, Callable[[Any], Sink]]:
    """Return a sink with each of the two guarantees, `sink(place, guarantee=...)`."""

    def make(level: str) -> Callable[[Any], Sink]:
        return lambda place: sink(place, guarantee=level)

    return {f"{name}, {shown}": make(level) for shown, level in LEVELS.items()}


@contextmanager
def kafka(directory: Path, rows: int) -> Iterator[System]:
    from headgate.testing.servers.kafka import running

    with running(directory) as broker:

        def topic(_rows: int) -> str:
            name = _name()
            broker.create_topic(name, 1)
            return name

        def sink(name: str, **options: Any) -> Sink:
            return hc.kafka_sink(name, bootstrap=broker.bootstrap, **options)

        def staged(name: str) -> Sink:
            kind: Any = {"guarantee": "exactly_once", "transactions": "staged"}
            return sink(name, buffer="512mb", **kind)

        yield System(
            topic,
            {**_both("kafka_sink", sink), "kafka_sink, exactly once, staged": staged},
            {
                "kafka_source": lambda name: hc.kafka_source(
                    name, bootstrap=broker.bootstrap, schema=SCHEMA, stop="latest"
                )
            },
        )


@contextmanager
def postgres(directory: Path, rows: int) -> Iterator[System]:
    from headgate.testing.servers.postgres import running

    with running(directory) as server:
        columns = 'id bigint PRIMARY KEY, "user" text, price float8, ms bigint, page text'

        def changes(name: str) -> Source:
            made = hc.postgres_cdc_source(
                server.dsn, name, slot=name, stop="latest", snapshot="never"
            )
            return made.with_columns(list(FIELDS))

        def table(_rows: int) -> str:
            name = _name()
            server.execute(f"CREATE TABLE {name} ({columns})")
            changes(name).splits(1)  # creates the slot, so that it has all changes
            return name

        yield System(
            table,
            _both("postgres_sink", lambda name, **o: hc.postgres_sink(server.dsn, name, **o)),
            {
                "postgres_source": lambda name: hc.postgres_source(server.dsn, name),
                "postgres_cdc_source": changes,
            },
        )


@contextmanager
def redis(directory: Path, rows: int) -> Iterator[System]:
    from headgate.testing.servers.redis import running

    with running(directory) as server:
        yield System(
            _name,
            _both("redis_sink", lambda name, **o: hc.redis_sink(name, url=server.url, **o)),
            {
                "redis_source": lambda name: hc.redis_source(
                    name, url=server.url, schema=SCHEMA, stop="latest"
                )
            },
        )


@contextmanager
def nats(directory: Path, rows: int) -> Iterator[System]:
    from headgate.testing.servers.nats import running
    from headgate.tests.support.stream_cases import NatsStream

    with running(directory) as server, contextlib.ExitStack() as places:
        stream = NatsStream(server)
        yield System(
            lambda _: places.enter_context(stream.place()),
            _both("nats_sink", lambda name, **o: hc.nats_sink(f"{name}.a", url=server.url, **o)),
            {
                "nats_source": lambda name: hc.nats_source(
                    name, url=server.url, schema=SCHEMA, stop="latest"
                )
            },
        )


@contextmanager
def rabbitmq(directory: Path, rows: int) -> Iterator[System]:
    from headgate.testing.servers.rabbitmq import running
    from headgate.tests.support.rabbitmq_cases import RabbitStream

    with running(directory) as server, contextlib.ExitStack() as places:
        stream = RabbitStream(server)
        yield System(
            lambda _: places.enter_context(stream.place()),
            _both("rabbitmq_sink", lambda name, **o: hc.rabbitmq_sink(name, url=stream.url, **o)),
            {
                "rabbitmq_source": lambda name: hc.rabbitmq_source(
                    name, url=stream.url, schema=SCHEMA, stop="latest"
                )
            },
        )


def _credentials() -> None:
    """Set credentials that the servers do not look at."""
    from headgate.tests.support.kinesis_cases import ENVIRONMENT

    os.environ.update(ENVIRONMENT)


@contextmanager
def kinesis(directory: Path, rows: int) -> Iterator[System]:
    from headgate.testing.servers.kinesis import running
    from headgate.tests.support.kinesis_cases import Stream

    _credentials()
    with running(directory) as server, contextlib.ExitStack() as places:
        stream = Stream(server)
        yield System(
            lambda _: places.enter_context(stream.place()),
            {"kinesis_sink, at least once": lambda n: hc.kinesis_sink(n, endpoint=server.url)},
            {
                "kinesis_source": lambda name: hc.kinesis_source(
                    name, endpoint=server.url, schema=SCHEMA, stop="latest"
                )
            },
        )


@contextmanager
def pulsar(directory: Path, rows: int) -> Iterator[System]:
    from headgate.testing.servers.pulsar import running

    with running(directory) as server:

        def topic(_rows: int) -> str:
            name = _name()
            server.create(name)
            return name

        yield System(
            topic,
            {"pulsar_sink, at least once": lambda name: hc.pulsar_sink(name, url=server.url)},
            {
                "pulsar_source": lambda name: hc.pulsar_source(
                    name, url=server.url, schema=SCHEMA, stop="latest"
                )
            },
        )


@contextmanager
def mqtt(directory: Path, rows: int) -> Iterator[System]:
    from headgate.testing.servers.mosquitto import running
    from headgate.tests.support.queue_cases import Topic

    # The broker of tests writes all of its state for every message.
    settings = "allow_anonymous true\nautosave_interval 1000000\nlog_type error"
    with running(directory, settings) as server:

        def topic(_rows: int) -> Topic:
            made = Topic(_name(), server.url)
            made.subscribe()
            return made

        yield System(
            topic,
            {"mqtt_sink, at least once": lambda topic: hc.mqtt_sink(topic.name, url=server.url)},
            {
                "mqtt_source": lambda topic: hc.mqtt_source(
                    topic.name, url=server.url, client_id=topic.session, schema=SCHEMA
                )
            },
        )


@contextmanager
def sqs(directory: Path, rows: int) -> Iterator[System]:
    from headgate.testing.servers.elasticmq import running
    from headgate.tests.support.sqs_cases import Queues

    _credentials()
    with running(directory) as server:
        queues = Queues(server.url)

        def queue(_rows: int) -> str:
            name = _name()
            queues.create(name)
            return name

        yield System(
            queue,
            {"sqs_sink, at least once": lambda name: hc.sqs_sink(name, endpoint=server.url)},
            {"sqs_source": lambda name: hc.sqs_source(name, endpoint=server.url, schema=SCHEMA)},
        )


@contextmanager
def delta(directory: Path, rows: int) -> Iterator[System]:
    from deltalake import write_deltalake

    def table(_rows: int) -> str:
        path = str(directory / _name())
        write_deltalake(path, ARROW.empty_table())
        return path

    yield System(table, {"delta_sink, exactly once": hc.delta_sink})


@contextmanager
def iceberg(directory: Path, rows: int) -> Iterator[System]:
    from headgate.tests.support.table_cases import IcebergSinkCase, let_readers_be

    directory.mkdir()
    let_readers_be(directory / "catalog.db")
    case = IcebergSinkCase()

    def table(_rows: int) -> str:
        name = _name()
        case.table(directory, name, ARROW)
        return f"cases.{name}"

    def sink(table: str) -> Sink:
        return hc.iceberg_sink(table, catalog=case.catalog(directory))

    yield System(table, {"iceberg_sink, exactly once": sink})


SYSTEMS: dict[str, tuple[Start, int]] = {
    "columns": (columns, 10_000_000),
    "objects": (objects, 200_000),
    "console": (console, 200_000),
    "hybrid": (hybrid, 10_000_000),
    "spark": (spark, 2_000_000),
    "ray": (ray_dataset, 1_000_000),
    "parquet": (_files("parquet"), 2_000_000),
    "csv": (_files("csv"), 1_000_000),
    "json": (_files("json"), 500_000),
    "text": (_files("text"), 2_000_000),
    "sockets": (sockets, 200_000),
    "http": (http, 50_000),
    "kafka": (kafka, 500_000),
    "postgres": (postgres, 100_000),
    "redis": (redis, 200_000),
    "nats": (nats, 100_000),
    "rabbitmq": (rabbitmq, 200_000),
    "kinesis": (kinesis, 3_000),
    "pulsar": (pulsar, 100_000),
    "mqtt": (mqtt, 20_000),
    "sqs": (sqs, 500),
    "delta": (delta, 1_000_000),
    "iceberg": (iceberg, 1_000_000),
}
"""By system: the function that starts it in a directory, and the number of records of a run."""
