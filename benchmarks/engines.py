"""The engines of the comparison: where each comes from, and how it is asked to run a query."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import Host, Run
from peers.jar import build_jar
from queries import QUERIES, write_parquet

HERE = Path(__file__).parent
PARQUET_ROWS = 4_000_000
PARQUET_READ_MAX = 16_000_000
"""headgate reads the Parquet file several times, up to this number of rows in all; Flink once."""
CHECK_ROWS = 500_000
EMPTY_RUNS = 3
"""The cheapest of the empty jobs in Flink counts: in the others the JVM still compiles the job before."""
LAMBDA_EVENTS = {"q1": 300_000, "q2": 300_000, "w": 60_000}
"""Records of a PyFlink run; the other queries need no Python function."""
NOT_INSTALLED = "not installed: pip install 'headgate[flink]', and a JDK 17 (java, javac, jar)"


@dataclass(frozen=True, slots=True)
class Case:
    """A run: a query in one setting."""

    query: str
    source: str
    parallelism: int
    checkpoint: bool
    slots: int = 1
    """The number of slots that each worker of headgate on Ray has."""


class Data:
    """The Parquet files of the benchmark, in `directory`."""

    def __init__(self, directory: Path, rows: int) -> None:
        self._directory = directory
        self.rows = rows

    def file(self, rows: int) -> Path:
        """One file of the first `rows` bids."""
        path = self._directory / f"bids-{rows}.parquet"
        write_parquet(str(path), rows)
        return path

    def repeated(self, times: int) -> Path:
        """A directory in which the file of `rows` bids appears `times` times."""
        file = self.file(self.rows)
        directory = self._directory / f"bids-{self.rows}-x{times}"
        directory.mkdir(exist_ok=True)
        for number in range(times):
            link = directory / f"{number:03}.parquet"
            if not link.exists():
                os.link(file, link)
        return directory


class Headgate:
    """headgate on one embedded Ray (`local`), or in one process."""

    def __init__(self, cluster: str, data: Data, log: Path, events: Mapping[str, int]) -> None:
        self._data = data
        self._events = events
        self.host = Host([sys.executable, str(HERE / "host.py"), cluster], log)

    def run(self, case: Case) -> Run:
        """Measure the steady part of one job."""
        wanted = self._events[case.query]
        times = max(1, round(min(wanted, PARQUET_READ_MAX) / self._data.rows))
        data = str(self._data.repeated(times)) if case.source == "parquet" else ""
        return self.host.measure(self._request(case, wanted, data, sums=False))

    def check(self, query: str, source: str) -> tuple[int, float]:
        """Number of results, and the sum of one of their columns, over the first bids."""
        data = str(self._data.file(CHECK_ROWS)) if source == "parquet" else ""
        request = self._request(Case(query, source, 1, False), CHECK_ROWS, data, sums=True)
        answer = self.host.ask(request)
        return answer["rows_out"], answer["sums"][QUERIES[query].check_column]

    @staticmethod
    def _request(case: Case, events: int, data: str, sums: bool) -> dict[str, Any]:
        return {
            "query": case.query,
            "source": case.source,
            "parallelism": case.parallelism,
            "checkpoint": case.checkpoint,
            "events": events,
            "data": data,
            "sums": sums,
            "slots": case.slots,
        }


@dataclass(frozen=True, slots=True)
class FlinkHome:
    """An installed Flink: the interpreter that has `pyflink`, and the jars of the benchmark."""

    python: str
    library: str
    """The class path of Flink itself."""
    jars: tuple[str, ...]
    parquet: bool


def find_flink(results: Path) -> FlinkHome | None:
    """Flink as installed for this interpreter, or for `HEADGATE_BENCH_FLINK_PYTHON`; None if not."""
    python = os.environ.get("HEADGATE_BENCH_FLINK_PYTHON", sys.executable)
    if not all(shutil.which(tool) for tool in ("java", "javac", "jar")):
        return None
    asked = subprocess.run(
        [python, "-c", "import pyflink; print(pyflink.__path__[0])"],
        capture_output=True,
        text=True,
        check=False,
    )
    if asked.returncode:
        return None
    home = Path(asked.stdout.strip())
    jar = results / "peers.jar"
    build_jar(jar, home)
    found = os.environ.get("HEADGATE_BENCH_FLINK_PARQUET_JAR")
    extra = [found] if found else [str(path) for path in home.glob("lib/flink-sql-parquet-*.jar")]
    return FlinkHome(python, f"{home}/lib/*", (str(jar), *extra), bool(extra))


class Flink:
    """One JVM, warmed with each query before it is measured. Start-up is what an empty job takes."""

    def __init__(
        self, home: FlinkHome, data: Data, log: Path, events: Mapping[str, int], lambdas: bool
    ) -> None:
        self._home = home
        self._data = data
        self._events = events
        self._lambdas = lambdas
        self._warm: set[tuple[str, str]] = set()
        self._empty: dict[tuple[str, str, int], Run] = {}
        self.host = Host([home.python, str(HERE / "peers" / "flink_sql.py")], log)

    def run(self, case: Case) -> Run:
        """Measure one job, without its start-up."""
        if (case.query, case.source) not in self._warm:
            self.host.ask(self._request(case, self._events[case.query]))
            self._warm.add((case.query, case.source))
        key = (case.query, case.source, case.parallelism)
        if key not in self._empty:
            few = [self.host.measure(self._request(case, 1)) for _ in range(EMPTY_RUNS)]
            self._empty[key] = min(few, key=lambda run: run.cpu_seconds)
        empty = self._empty[key]
        whole = self.host.measure(self._request(case, self._events[case.query]))
        return Run(
            events=whole.events,
            seconds=max(whole.seconds - empty.seconds, 1e-3),
            cpu_seconds=max(whole.cpu_seconds - empty.cpu_seconds, 0.0),
            peak_bytes=whole.peak_bytes,
            answer=whole.answer,
            foreign_cores=whole.foreign_cores,
        )

    def check(self, query: str, source: str) -> tuple[int, float]:
        """Number of results, and the sum of one of their columns, over the first bids."""
        request = self._request(Case(query, source, 1, False), CHECK_ROWS)
        answer = self.host.ask({**request, "sums": True})
        return answer["rows_out"], answer["sum"]

    def _request(self, case: Case, events: int) -> dict[str, Any]:
        query = QUERIES[case.query]
        if case.source == "parquet":
            events = events if events in (1, CHECK_ROWS) else self._data.rows
        return {
            "query": case.query,
            "source": case.source,
            "parallelism": case.parallelism,
            "checkpoint": case.checkpoint,
            "events": events,
            "data": str(self._data.file(events)) if case.source == "parquet" else "",
            "jars": self._home.jars,
            "sums": False,
            "event_time": query.event_time,
            "sql": query.sql,
            "check_sql": query.check_sql.format(sql=query.sql),
            "lambdas": self._lambdas,
        }
