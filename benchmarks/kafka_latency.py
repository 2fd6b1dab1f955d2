"""The latency of records from Kafka: `python benchmarks/kafka_latency.py [--rounds 3] [--flink]`.

A producer in a process of its own writes JSON records of about 100 bytes to four partitions at a fixed
rate, with the defaults of Kafka's own producer: batches of 5 ms, idempotent. Each has the time at which it
was due, so a stall of the producer counts as well. The job is `kafka ->
key_by -> running count -> sink`, with no option set; the sink takes the time since the record was due. The
producer begins together with the engine, so the first seconds, in which the engine starts and catches up,
are cut off. A result stands for the newest of the records of a key that came in one batch.

With `--to-kafka` the results go back to a topic, at least once and with a checkpoint every second, and a
process that reads it takes the time. So the time has all of the way from Kafka to Kafka.

With `--flink` each round also runs the job as a Flink DataStream (`KafkaSource`, `keyBy`, `reduce`), in a
JVM of its own, from the same broker at the same rate. Latency is time by the clock, which other work on the
machine makes longer, so the load is printed. CPU seconds are those of the engine only, start included.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from engines import FlinkHome
from kafka_topics import PARTITIONS, connector
from record_latency import (
    KEYS,
    OPENS,
    US,
    LatencySink,
    chosen_flink,
    latencies,
    print_head,
    print_row,
    run_job,
)

import headgate as hg
from headgate.connectors import kafka_sink, kafka_source
from headgate.runtime.cluster.process import tune_process
from headgate.testing.servers.kafka import KafkaServer, running

HERE = Path(__file__).parent
WARM_S = 20.0
TICK_S = 0.002
SCHEMA = {"key": "long", "due": "long"}
ENDED = "ended"
"""The file that tells the reader of results that the job has ended."""
_DUE = b'"due":'


def produce(bootstrap: str, topic: str, rate: float, rows: int) -> None:
    """Write records when they are due, in turn to the partitions; `rows` is for each of these."""
    from confluent_kafka import Producer

    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "linger.ms": 5,
            "enable.idempotence": True,
            "queue.buffering.max.messages": 0,
        }
    )
    began = time.time_ns() // 1000
    done, all_rows = 0, rows * PARTITIONS
    while done < all_rows:
        due = min(int((time.time_ns() // 1000 - began) * rate / US) + 1, all_rows)
        due -= due % PARTITIONS
        for partition in range(PARTITIONS if due > done else 0):
            messages = []
            for row in range(done + partition, due, PARTITIONS):
                key, at = row * 2_654_435_761 % KEYS, began + int(row * US / rate)
                page = f"/shop/item-{row % 7919:05}/view?from=search&position={key:05}"
                value = f'{{"key":{key},"due":{at},"page":"{page}"}}'.encode()
                messages.append({"value": value})
            producer.produce_batch(topic, messages, partition=partition)
        done = max(done, due)
        producer.poll(0)
        time.sleep(TICK_S)
    producer.flush()


def read_results(bootstrap: str, topic: str, directory: str) -> None:
    """Take the latencies of results in a topic until the job has ended and all of them are read.

    Values are looked at in the end, and garbage is not collected: both would make the results wait for this
    process.
    """
    from confluent_kafka import Consumer, TopicPartition

    gc.disable()
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "latency"})
    consumer.assign([TopicPartition(topic, partition, 0) for partition in range(PARTITIONS)])
    found: list[tuple[int, list[bytes | None]]] = []
    ended = Path(directory, ENDED)
    while True:
        last = ended.exists()
        messages = consumer.consume(10_000, 1.0 if last else 0.002)
        found.append((time.time_ns() // 1000, [each.value() for each in messages]))
        if last and not messages:
            break
    read = [(value, now_us) for now_us, values in found for value in values if value]
    due = [int(value[value.index(_DUE) + len(_DUE) :].strip(b"}")) for value, _ in read]
    times = np.array(due, np.int64)
    waits = np.array([now_us for _, now_us in read], np.int64) - times
    np.save(Path(directory, "latency-0.npy"), waits[times >= times[0] + WARM_S * US] / 1000)


def make_job(
    broker: KafkaServer, topic: str, rows: int, parallelism: int, directory: str, results: str
) -> hg.Job:
    """The job under measurement, which ends behind the last record; `results` is the topic for them."""
    job = hg.Job("kafka-latency", parallelism=parallelism)
    ends = {topic: dict.fromkeys(range(PARTITIONS), rows)}
    source = kafka_source(topic, bootstrap=broker.bootstrap, schema=SCHEMA, stop=ends)
    counts = job.read(source, name="events").key_by("key")
    made = counts.agg(n=hg.count(), due=hg.max("due"), name="count")
    if results:
        job.checkpoint(every="1s", storage=f"{directory}/state")
        made.write(kafka_sink(results, bootstrap=broker.bootstrap), name="out")
    else:
        made.write(LatencySink(directory, WARM_S), name="out")
    return job


def measure(
    broker: KafkaServer,
    flink: FlinkHome | None,
    rate: float,
    seconds: float,
    parallelism: int,
    to_kafka: bool,
) -> tuple[np.ndarray, float]:
    """Return the latencies of one run in ms, and the CPU seconds of the engine per million records."""
    topic = f"latency-{time.monotonic_ns()}"
    results = f"{topic}-results" if to_kafka else ""
    for each in filter(None, (topic, results)):
        broker.create_topic(each, PARTITIONS)
    rows = int(rate * seconds) // PARTITIONS
    with tempfile.TemporaryDirectory(prefix="hg-latency-") as directory:
        own = [sys.executable, str(HERE / "kafka_latency.py")]
        reading = [*own, "--read", broker.bootstrap, results, directory] if results else ["true"]
        produce = [*own, "--produce", broker.bootstrap, topic, str(rate), str(rows)]
        with subprocess.Popen(produce) as producer, subprocess.Popen(reading) as reader:
            try:
                if flink is not None:
                    cpu_s = run_flink(flink, broker, topic, rows, parallelism, directory, results)
                else:
                    job = make_job(broker, topic, rows, parallelism, directory, results)
                    cpu_s = run_job(job, parallelism, directory)
            finally:
                Path(directory, ENDED).touch()
            assert producer.wait() == 0
            assert reader.wait() == 0
        found = latencies(directory)
    return found, cpu_s / (rows * PARTITIONS) * US


def run_flink(
    home: FlinkHome,
    broker: KafkaServer,
    topic: str,
    rows: int,
    parallelism: int,
    directory: str,
    results: str,
) -> float:
    """Run the job in Flink, and return its CPU seconds."""
    jar = connector()
    classes = Path(home.jars[0]).parent / "kafka-classes"
    path = f"{home.jars[0]}:{jar}:{home.library}"
    if not classes.exists():
        source = HERE / "peers" / "java" / "kafka" / "KafkaLatency.java"
        subprocess.run(
            ["javac", "-nowarn", "-proc:none", "-cp", path, "-d", str(classes), str(source)],
            check=True,
            stderr=subprocess.PIPE,
        )
    arguments = [broker.bootstrap, topic, PARTITIONS, rows, parallelism, WARM_S, directory]
    arguments += filter(None, [results])
    command = ["java", *OPENS, "-cp", f"{classes}:{path}", "KafkaLatency", *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as engine:
        _, status, used = os.wait4(engine.pid, 0)
        engine.returncode = os.waitstatus_to_exitcode(status)
    assert engine.returncode == 0, "the job of Flink failed"
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=50_000, help="records per second")
    parser.add_argument("--parallelism", default="1")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each run")
    parser.add_argument("--flink", action="store_true", help="in turns with Flink")
    parser.add_argument("--to-kafka", action="store_true", help="results go to a topic")
    parser.add_argument("--produce", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--read", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.read:
        read_results(*given.read)
        return
    if given.produce:
        bootstrap, topic, rate, rows = given.produce
        produce(bootstrap, topic, float(rate), int(rows))
        return
    tune_process()
    with tempfile.TemporaryDirectory(prefix="hg-latency-kafka-") as directory:
        flink = chosen_flink(directory, given.flink)
        print_head(given.rounds)
        with running(Path(directory) / "broker") as broker:
            for parallelism in map(int, given.parallelism.split(",")):
                compare(broker, flink, parallelism, given)


def compare(
    broker: KafkaServer, flink: FlinkHome | None, parallelism: int, given: argparse.Namespace
) -> None:
    """Run all rounds, and print a line for each engine."""
    runs: dict[str, list[tuple[np.ndarray, float]]] = {}
    for _ in range(given.rounds):
        for name, home in {"headgate": None, **({"flink": flink} if flink else {})}.items():
            found = measure(broker, home, given.rate, given.seconds, parallelism, given.to_kafka)
            runs.setdefault(name, []).append(found)
    for name, results in runs.items():
        print_row(name, given.rate, parallelism, results)


if __name__ == "__main__":
    main()
