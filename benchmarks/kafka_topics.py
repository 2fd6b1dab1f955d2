"""Kafka beside Flink, on one broker: `python benchmarks/kafka_topics.py [--rows N] [--rounds N]`.

JSON records of about 100 bytes are read from four partitions, decoded, grouped by a user, and counted and
added up per 10 seconds of event time: by headgate, in one process and on a local Ray, and by Flink SQL
with its Kafka connector. The engines take turns, round by round, and the medians are printed, with the
medians and ranges of the ratios to Flink's time and CPU seconds of the same round. CPU seconds are those of
an engine's processes, without the broker. The results of all engines must be equal.

Only the steady part counts, by the same rule for all engines. Each round runs a job twice: over a topic
with a quarter of the records, and over one with all of them. The differences in time and CPU seconds are
what the other three quarters took. The first quarter has the start of processes, imports, code that an
engine makes for the job, and the caches and compilers that have to become warm.

Then one subtask of headgate reads topics, and writes them with each guarantee, in one process.

Flink needs `HEADGATE_BENCH_FLINK_PYTHON`, an interpreter that has `pyflink`; its connector comes from Maven
Central once. Without it only headgate is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
CONNECTOR = "5.0.0-2.2"
_JAR = f"flink-sql-connector-kafka-{CONNECTOR}.jar"
_URL = (
    f"https://repo1.maven.org/maven2/org/apache/flink/flink-sql-connector-kafka/{CONNECTOR}/{_JAR}"
)
PARTITIONS = 4
USERS = 1_000
WINDOW_MS = 10_000
WARM_SHARE = 0.25
"""This share of the records is in the topic of the first part, which is subtracted."""
FILL_ROWS = 10_000
SCHEMA = {"id": "long", "user": "string", "price": "double", "ms": "long", "page": "string"}
COLUMNS = "id BIGINT, `user` STRING, price DOUBLE, ms BIGINT, page STRING"
SQL = (
    "SELECT `user`, window_start, COUNT(*) AS n, SUM(price) AS total FROM "
    "TABLE(TUMBLE(TABLE events, DESCRIPTOR(moment), INTERVAL '10' SECOND)) "
    "GROUP BY `user`, window_start, window_end"
)
CHECK = "SELECT COUNT(*), CAST(SUM(n) AS DOUBLE), SUM(total) FROM ({sql})"
UNKNOWN = "unknown: a start took longer than the records, take more of them"


def message(number: int) -> bytes:
    """Record `number`, one per millisecond."""
    page = f"/shop/item-{number % 7919:05}/view"
    return json.dumps(
        {
            "id": number,
            "user": f"user-{number * 7919 % USERS:04}",
            "price": number % 1000 / 4,
            "ms": number,
            "page": page,
        },
        separators=(",", ":"),
    ).encode()


def expected(rows: int) -> tuple[int, float, float]:
    """The answer: number of windows, of records, and the sum of the prices."""
    windows = {(n * 7919 % USERS, n // WINDOW_MS) for n in range(rows)}
    return len(windows), float(rows), sum(n % 1000 / 4 for n in range(rows))


def fill(bootstrap: str, topic: str, rows: int) -> None:
    """Write the records in turn to the partitions, in blocks."""
    from confluent_kafka import Producer

    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "linger.ms": 20,
            "batch.size": 1_000_000,
            "queue.buffering.max.messages": 0,
        }
    )
    for number in range(rows):
        partition = number // FILL_ROWS % PARTITIONS
        while True:
            try:
                producer.produce(topic, value=message(number), partition=partition)
                break
            except BufferError:
                producer.poll(0.1)
        if number % FILL_ROWS == 0:
            producer.poll(0)
    producer.flush()


# -- a process that runs jobs of headgate -----------------------------------------------------------------


def make_job(request: Mapping[str, Any], directory: str) -> Any:
    """The job of a request, which writes its marks to `directory`."""
    from metering import TallySink

    import headgate as hg
    from headgate.connectors import (
        blackhole,
        choice,
        generator,
        kafka_sink,
        kafka_source,
        sequence,
    )

    name, parallelism = request["job"], request["parallelism"]
    job = hg.Job(f"kafka-{name}-{Path(directory).name}", parallelism=parallelism)
    topic, bootstrap = request["topic"], request["bootstrap"]
    if name.startswith("write"):
        _, guarantee, transactions = name.split("-")
        job.checkpoint(every="1s", storage=f"{directory}/state")
        fields = {
            "id": sequence(),
            "user": choice([f"user-{number:04}" for number in range(USERS)]),
            "price": sequence(),
            "ms": sequence(),
            "page": choice([f"/shop/item-{number:05}/view" for number in range(100)]),
        }
        kind: Any = {"transactions": "staged", "buffer": "512mb"} if transactions else {}
        sink = kafka_sink(topic, bootstrap=bootstrap, guarantee=guarantee, **kind)  # type: ignore[arg-type]
        rows = job.read(generator(fields, rows=request["rows"], splits=1), name="rows")
        rows.write(sink, name="out")
        return job
    if name == "read-raw":
        raw = kafka_source(topic, bootstrap=bootstrap, format="raw", stop="latest")
        job.read(raw, name="events").write(blackhole(), name="out")
        return job
    source = kafka_source(topic, bootstrap=bootstrap, schema=SCHEMA, stop="latest")
    events = job.read(source, name="events")
    if name == "read-json":
        events.write(blackhole(), name="out")
        return job
    timed = events.event_time("ms", max_out_of_order="1s")
    window = timed.key_by("user").window(hg.tumbling("10s"))
    totals = window.agg(n=hg.count(), total=hg.sum("price"), name="totals")
    totals.write(TallySink(directory, sums=True), name="out")
    return job


def run_job(request: Mapping[str, Any], cluster: str) -> dict[str, Any]:
    """Run a job from its start to its end."""
    with tempfile.TemporaryDirectory(prefix="hg-bench-") as directory:
        job = make_job(request, directory)
        began = time.monotonic()
        job.run(cluster=cluster)
        ended = time.monotonic()
        found = [json.loads(path.read_text()) for path in Path(directory).glob("sink-*.json")]
    return {
        "began": began,
        "ended": ended,
        "events": request["rows"],
        "rows_out": sum(each["rows"] for each in found),
        "n": sum(each["sums"].get("n", 0) for each in found),
    }


def serve(cluster: str) -> None:
    """Run the jobs that are asked for on standard input, as `host.py` does."""
    from host import clustered

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with clustered(cluster):
        print(json.dumps({"ready": True}), file=answers, flush=True)
        for line in sys.stdin:
            try:
                answer = run_job(json.loads(line), cluster)
            except Exception as error:
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
            print(json.dumps(answer), file=answers, flush=True)


# -- Flink -----------------------------------------------------------------------------------------------


def connector() -> Path:
    """The jar of Flink's Kafka connector, which is fetched once."""
    from headgate.testing.servers.programs import made_once

    def fetch(directory: Path) -> None:
        with urllib.request.urlopen(_URL, timeout=120) as answer:
            (directory / _JAR).write_bytes(answer.read())

    return made_once(f"flink-kafka-{CONNECTOR}", [_JAR], fetch) / _JAR


def flink_request(request: Mapping[str, Any], jar: Path) -> dict[str, Any]:
    """The window job of a request, for `peers/flink_sql.py`."""
    options = {
        "connector": "kafka",
        "topic": request["topic"],
        "properties.bootstrap.servers": request["bootstrap"],
        "scan.startup.mode": "earliest-offset",
        "scan.bounded.mode": "latest-offset",
        "format": "json",
    }
    settings = ", ".join(f"'{name}' = '{value}'" for name, value in options.items())
    table = (
        f"CREATE TABLE events ({COLUMNS}, moment AS TO_TIMESTAMP_LTZ(ms, 3), "
        f"WATERMARK FOR moment AS moment - INTERVAL '1' SECOND) WITH ({settings})"
    )
    return {
        "tables": [table],
        "sql": SQL,
        "check_sql": CHECK.format(sql=SQL),
        "jars": [str(jar)],
        "parallelism": request["parallelism"],
        "checkpoint": False,
        "lambdas": False,
        "events": request["rows"],
        "sums": request.get("sums", False),
    }


# -- the comparison -------------------------------------------------------------------------------------


class Engine:
    """One engine in a process of its own."""

    def __init__(self, name: str, host: Any, ask: Any) -> None:
        self.name, self.host, self._ask = name, host, ask
        self._warm: set[tuple[str, int]] = set()
        self.seconds: dict[tuple[str, int], list[float]] = {}
        """Seconds per million records, of each round."""
        self.cpu_seconds: dict[tuple[str, int], list[float]] = {}
        """CPU seconds per million records, of each round."""

    def measure(
        self, job: str, parallelism: int, topics: tuple[str, str], rows: int, b: str
    ) -> Any:
        """Measure the steady part of a job; the first time the engine is warmed before.

        Args:
            job: its name.
            parallelism: of the job.
            topics: that of all records, and that of the first `WARM_SHARE` of them.
            rows: the number of all records.
            b: the address of the broker.
        """

        def request(topic: str, rows: int) -> dict[str, Any]:
            return {
                "job": job,
                "parallelism": parallelism,
                "topic": topic,
                "bootstrap": b,
                "rows": rows,
            }

        key = (job, parallelism)
        whole, first = topics
        warm_rows = int(rows * WARM_SHARE)
        if key not in self._warm:
            self._warm.add(key)
            self.host.ask(self._ask(request(whole, rows)))
        begun = self.host.measure(self._ask(request(first, warm_rows)))
        found = self.host.measure(self._ask(request(whole, rows)))
        millions = (rows - warm_rows) / 1e6
        # Beside other work a start may take longer than the records. `show` says so.
        seconds = (found.seconds - begun.seconds) / millions
        cpu_seconds = (found.cpu_seconds - begun.cpu_seconds) / millions
        self.seconds.setdefault(key, []).append(seconds)
        self.cpu_seconds.setdefault(key, []).append(cpu_seconds)
        return found.answer


def show(engines: list[Engine], key: tuple[str, int], peer: Engine | None) -> None:
    """Print the medians of a job, and the ratios to Flink's."""
    for engine in engines:
        if key not in engine.seconds:
            continue
        seconds, cpu = median(engine.seconds[key]), median(engine.cpu_seconds[key])
        ratio = ""
        if peer is not None and key in peer.seconds:
            ratio = f" {_ratios(peer.seconds[key], engine.seconds[key])} |"
            ratio += f" {_ratios(peer.cpu_seconds[key], engine.cpu_seconds[key])} |"
        rate = f"{1 / seconds:.3f}" if seconds > 0 else UNKNOWN
        print(f"| {key[0]} | {key[1]} | {engine.name} | {rate} | {cpu:.3f} |{ratio}", flush=True)


def _ratios(peer: list[float], own: list[float]) -> str:
    """Return the median and the range of the ratios of single rounds, if each of them has one."""
    if min(*peer, *own) <= 0:
        return UNKNOWN
    found = [theirs / ours for theirs, ours in zip(peer, own, strict=True)]
    return f"{median(found):.2f} ({min(found):.2f} to {max(found):.2f})"


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=3_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="window,read,write", help="some of them")
    parser.add_argument("--parallelism", default="1,2", help="of the window job")
    parser.add_argument("--host", default="")
    given = parser.parse_args()
    if given.host:
        serve(given.host)
        return
    from measure import Host

    from headgate.testing.servers.kafka import running

    wanted = set(given.only.split(","))
    with tempfile.TemporaryDirectory(prefix="hg-bench-kafka-") as directory:
        log = Path(directory) / "hosts.log"
        with running(Path(directory) / "broker") as broker:
            for topic, rows in (("events", given.rows), ("first", int(given.rows * WARM_SHARE))):
                broker.create_topic(topic, PARTITIONS)
                fill(broker.bootstrap, topic, rows)
            broker.create_topic("written", 1, {"retention.bytes": "100000000"})

            def headgate(cluster: str) -> Any:
                return Host([sys.executable, str(HERE / "kafka_topics.py"), "--host", cluster], log)

            python = os.environ.get("HEADGATE_BENCH_FLINK_PYTHON")
            inside = Engine("headgate in-process", headgate("in-process"), lambda asked: asked)
            engines, peer = [inside], None
            try:
                if "window" in wanted:
                    engines.append(Engine("headgate", headgate("local"), lambda asked: asked))
                if "window" in wanted and python and _has_flink(python):
                    jar = connector()
                    host = Host([python, str(HERE / "peers" / "flink_sql.py")], log)
                    peer = Engine("Flink SQL", host, lambda asked: flink_request(asked, jar))
                    engines.append(peer)
                if "window" in wanted:
                    compare(engines, peer, given, broker.bootstrap)
                others = {
                    "read": ("read-raw", "read-json"),
                    "write": (
                        "write-at_least_once-",
                        "write-exactly_once-",
                        "write-exactly_once-staged",
                    ),
                }
                for kind, jobs in others.items():
                    for job in jobs if kind in wanted else ():
                        topics = ("events", "first") if kind == "read" else ("written", "written")
                        for _ in range(given.rounds):
                            inside.measure(job, 1, topics, given.rows, broker.bootstrap)
                        show([inside], (job, 1), None)
            except BaseException:
                print(log.read_text()[-4000:], file=sys.stderr)
                raise
            finally:
                for engine in engines:
                    engine.host.close()


def compare(
    engines: list[Engine], peer: Engine | None, given: argparse.Namespace, bootstrap: str
) -> None:
    """Measure the window job in turn on all engines, and check that their results are equal."""
    rows = given.rows
    right = expected(rows)
    for parallelism in map(int, given.parallelism.split(",")):
        for _ in range(given.rounds):
            for engine in engines:
                answer = engine.measure("window", parallelism, ("events", "first"), rows, bootstrap)
                if engine is not peer:
                    assert (answer["rows_out"], answer["n"]) == right[:2], (engine.name, answer)
        show(engines, ("window", parallelism), peer)
    if peer is not None:
        asked = {
            "topic": "events",
            "bootstrap": bootstrap,
            "parallelism": 1,
            "rows": rows,
            "sums": True,
        }
        answer = peer.host.ask(flink_request(asked, connector()))
        assert answer["rows_out"] == right[0], answer
        assert answer["sums"] == list(right[1:]), (answer, right)


def _has_flink(python: str) -> bool:
    return not subprocess.run([python, "-c", "import pyflink"], check=False).returncode


if __name__ == "__main__":
    main()
