"""A table of PostgreSQL, by way of Kafka, as a history in Iceberg, while everything is killed.

    pip install "headgate[dev]"
    python examples/lakehouse_demo.py [--kills 12] [--changes 6000] [--seed 1] [--keep DIRECTORY]

1. starts a real PostgreSQL and a real Kafka (Java and Maven are needed; the jars are fetched once),
2. starts `headgate run examples/orders_to_kafka.py`, which writes the changes of the table `orders` into a
   topic, and `headgate run examples/orders_to_iceberg.py`, which appends them to an Iceberg table,
3. changes the table in random transactions, some of which are rolled back; a trigger keeps every change,
4. kills with SIGKILL, by a schedule that the seed decides: a process of one of the two jobs, which starts
   again from its newest checkpoint, the broker, or the database, which start again with their files,
5. compares the Iceberg table with the changes that the trigger has kept, and the newest version of each
   row in it with the table.

Exits with 0 only if they are equal, and everything was killed.
"""

from __future__ import annotations

import argparse
import contextlib
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
from pathlib import Path
from typing import Any

import psycopg
from pyiceberg.catalog import load_catalog

from headgate.testing.servers.kafka import KafkaServer
from headgate.testing.servers.postgres import PostgresServer

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from flights_kafka_demo import HEADGATE, say  # noqa: E402

JOBS = ("orders_to_kafka", "orders_to_iceberg")
KINDS = (*JOBS, "broker", "database")
ROWS = 200
"""The rows that the table has before the jobs start."""
END_S_MAX = 300.0
"""Jobs that have not written all changes for this time after the last one hang."""
STATES = ("new", "paid", "sent", "returned")
TABLES = (
    "CREATE TABLE orders (id bigint PRIMARY KEY, version bigint, status text, cents bigint)",
    "ALTER TABLE orders REPLICA IDENTITY FULL",
    "CREATE TABLE history (op text, id bigint, version bigint, status text, cents bigint)",
    "CREATE SEQUENCE versions",
    "INSERT INTO orders SELECT n, nextval('versions'), 'new', n * 100 "
    f"FROM generate_series(1, {ROWS}) n",
    "INSERT INTO history SELECT 'snapshot', * FROM orders",
    "CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
    "IF TG_OP = 'DELETE' THEN INSERT INTO history SELECT 'delete', OLD.*; "
    "ELSE INSERT INTO history SELECT lower(TG_OP), NEW.*; END IF; RETURN NULL; END $$",
    "CREATE TRIGGER keep AFTER INSERT OR UPDATE OR DELETE ON orders "
    "FOR EACH ROW EXECUTE FUNCTION keep()",
)
Row = tuple[str, int, int, str, int]


def schedule(kills: int, seed: int) -> list[tuple[str, float]]:
    """Return as many kills of each kind, each with the pause after it, as the seed decides."""
    rng = random.Random(seed)
    kinds = [KINDS[number % len(KINDS)] for number in range(kills)]
    rng.shuffle(kinds)
    return [(kind, rng.uniform(0.5, 4.0)) for kind in kinds]


class Changes(threading.Thread):
    """Changes the table. It does not matter whether a transaction is there whose answer was lost."""

    def __init__(self, dsn: str, seed: int) -> None:
        super().__init__(daemon=True)
        self._dsn, self._rng = dsn, random.Random(seed)
        self._allowed = threading.Condition()
        self._until = 0
        self.made = 0
        self.over = False

    def allow(self, changes: int) -> None:
        """Make changes until there are this many."""
        with self._allowed:
            self._until = changes
            self._allowed.notify_all()

    def run(self) -> None:
        while not self.over:
            try:
                with psycopg.connect(self._dsn, connect_timeout=5) as connection:
                    while not self.over:
                        with self._allowed:
                            if not self._allowed.wait_for(lambda: self.made < self._until, 0.1):
                                continue
                        self._transaction(connection)
                        time.sleep(0.002)
            except psycopg.Error:
                time.sleep(0.2)

    def _transaction(self, connection: psycopg.Connection[Any]) -> None:
        rng, size = self._rng, self._rng.randrange(1, 8)
        for _ in range(size):
            number = rng.randrange(1, ROWS * 2)
            choice = rng.random()
            if choice < 0.1:
                connection.execute("DELETE FROM orders WHERE id = %s", (number,))
                continue
            connection.execute(
                "INSERT INTO orders VALUES (%s, nextval('versions'), %s, %s) ON CONFLICT (id) DO "
                "UPDATE SET version = EXCLUDED.version, status = EXCLUDED.status, "
                "cents = EXCLUDED.cents",
                (number, rng.choice(STATES), rng.randrange(10_000)),
            )
        if rng.random() < 0.1:
            connection.rollback()
        else:
            connection.commit()
            self.made += size


class Running:
    """A job as a process of its own, which is started again after a kill."""

    def __init__(self, name: str, work: Path, environment: dict[str, str]) -> None:
        self.name = name
        self._log = work / f"{name}.log"
        self._environment = {
            **os.environ,
            **environment,
            "HEADGATE_RUN_DIR": str(work / f"{name}-run"),
            "CHECKPOINTS": str(work / f"{name}-checkpoints"),
        }
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the job, from its newest checkpoint if there is one."""
        command = [HEADGATE, "run", str(HERE / f"{self.name}.py")]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "--cluster", "in-process", "--take-over"],
                env=self._environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def kill(self) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def stop(self) -> int | None:
        """Stop the job with a last checkpoint, and return its exit code; None if it does not end."""
        assert self._process is not None
        self._process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(END_S_MAX)
        return None

    def tail(self) -> str:
        return (
            f"the end of the log of {self.name}:\n{self._log.read_text(errors='replace')[-3_000:]}"
        )


def lake(directory: Path) -> list[Row]:
    """Return all rows of the Iceberg table."""
    from pyiceberg.exceptions import NoSuchTableError

    with load_catalog("default", uri=f"sqlite:///{directory}/catalog.db") as catalog:
        try:
            table = catalog.load_table("shop.orders").scan().to_arrow()
        except NoSuchTableError:
            return []
    columns = ("op", "id", "version", "status", "cents")
    return list(zip(*(table.column(name).to_pylist() for name in columns), strict=True))


def compare(found: list[Row], history: list[Row], table: list[Row]) -> bool:
    """Print how the Iceberg table differs from the changes and from the table; return if they are equal."""
    there, expected = Counter(found), Counter(history)
    lost, more = (expected - there).total(), there - expected
    doubled = sum(count for row, count in more.items() if row in expected)
    newest: dict[int, Row] = {}
    for row in sorted(found, key=lambda row: (row[2], row[0] == "delete")):
        newest[row[1]] = row
    now = {row[1:] for row in newest.values() if row[0] != "delete"}
    wrong = more.total() - doubled + len(now ^ {row[1:] for row in table})
    say(
        f"PostgreSQL: {len(history):,} changes, {len(table):,} rows; Iceberg: {len(found):,} changes"
    )
    say(f"changes lost: {lost:,}, doubled: {doubled:,}, wrong: {wrong:,}")
    equal = not (lost or doubled or wrong)
    say("EQUAL" if equal else "NOT EQUAL")
    return equal


def demo(work: Path, kills: list[tuple[str, float]], changes_max: int, seed: int) -> int:
    work.mkdir(parents=True, exist_ok=True)
    (work / "lake").mkdir()
    say("starting PostgreSQL and a Kafka broker")
    database, broker = PostgresServer(work / "database"), KafkaServer(work / "broker")
    jobs: dict[str, Running] = {}
    changes = Changes(database.dsn, seed)
    try:
        database.start()
        broker.start()
        database.execute(*TABLES)
        broker.create_topic("orders", 2)
        environment = {
            "DATABASE": database.dsn,
            "BROKER": broker.bootstrap,
            "LAKE": str(work / "lake"),
        }
        for name in JOBS:
            jobs[name] = Running(name, work, environment)
            jobs[name].start()
            say(f"headgate run examples/{name}.py")
        # The rows that the table has are in the history as such, so they must have been read before.
        if not _wait(work, jobs, ROWS):
            return 1
        say(f"{len(kills)} kills, while the table changes")
        changes.start()
        for number, (kind, pause_s) in enumerate(kills):
            changes.allow(changes_max * (number + 1) // (len(kills) + 1))
            time.sleep(pause_s)
            _kill(kind, jobs, broker, database)
            say(f"kill -9 {number + 1} of {len(kills)}: {kind}   ({changes.made:,} changes made)")
        changes.allow(changes_max)
        deadline = time.monotonic() + END_S_MAX
        while changes.made < changes_max and time.monotonic() < deadline:
            time.sleep(0.1)
        changes.over = True
        changes.join()
        history: list[Any] = database.execute("SELECT * FROM history")
        table: list[Any] = database.execute("SELECT '', * FROM orders")
        if not _wait(work, jobs, len(history)):
            return 1
        for job in jobs.values():
            code = job.stop()
            if code != 0:
                say(f"{job.name} does not end" if code is None else f"it ended with {code}")
                say(job.tail())
                return 1
        return 0 if compare(lake(work / "lake"), history, table) else 1
    finally:
        changes.over = True
        for job in jobs.values():
            job.kill()
        broker.close()
        database.close()


def _kill(
    kind: str, jobs: dict[str, Running], broker: KafkaServer, database: PostgresServer
) -> None:
    """Kill something, and start it again."""
    victim: Any = jobs.get(kind) or {"broker": broker, "database": database}[kind]
    victim.kill()
    victim.start()


def _wait(work: Path, jobs: dict[str, Running], rows: int) -> bool:
    """Wait until the Iceberg table has this number of rows; return False if it never has."""
    deadline = time.monotonic() + END_S_MAX
    while time.monotonic() < deadline:
        ended = [job for job in jobs.values() if job.ended]
        if ended:
            say(f"{ended[0].name} has ended")
            break
        if len(lake(work / "lake")) >= rows:
            return True
        time.sleep(0.5)
    else:
        say(f"HANG: {len(lake(work / 'lake')):,} of {rows:,} changes are in the Iceberg table")
    for job in jobs.values():
        say(job.tail())
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=12, help="at least 4; default: %(default)s")
    parser.add_argument("--changes", type=int, default=6_000, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--keep", type=Path, help="a new directory for all that is written")
    given = parser.parse_args()
    if given.kills < len(KINDS):
        parser.error(f"--kills must be at least {len(KINDS)}: one of each kind")
    if given.keep is not None and given.keep.exists():
        parser.error(f"{given.keep} is there already: delete it, or name another")
    work = (given.keep or Path(tempfile.mkdtemp(prefix="headgate-lakehouse-demo-"))).resolve()
    try:
        return demo(work, schedule(given.kills, given.seed), given.changes, given.seed)
    finally:
        if given.keep is None:
            shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
