"""The job whose savepoints are kept here: every kind of state there is. It must not change any more."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

import msgspec

import headgate as hg
from headgate.connectors import collect, csv_source, parquet_sink, throttle

NAME = "compat"
KEY_GROUPS = 12
EVENTS = {
    "id": "long",
    "name": "string",
    "number": "long",
    "ratio": "double",
    "price": "decimal(10,2)",
    "at": "timestamp",
}
LAST_FIRST = "35m"
"""The delay of watermarks: with both files in one subtask, the second begins that much earlier."""
TOLD_FROM = datetime(2024, 3, 1, 0, 15, tzinfo=UTC)
"""Results of the process function before that would only make the savepoints larger."""
FOR_EVER = "36500d"


class Account(msgspec.Struct):
    """A value with fields."""

    count: int
    spent: Decimal
    last: datetime | None = None
    label: str | None = None


class Mean:
    """An accumulator of sum and count."""

    def create(self) -> tuple[float, int]:
        return 0.0, 0

    def add(self, accumulator: tuple[float, int], value: float) -> tuple[float, int]:
        return accumulator[0] + value, accumulator[1] + 1

    def result(self, accumulator: tuple[float, int]) -> float:
        return accumulator[0] / accumulator[1]


class Everything(hg.KeyedProcess[int, Any, dict[str, Any]]):
    """A process function with every kind of state; a result tells all that its key has."""

    total = hg.ValueState[int](default=0)
    account = hg.ValueState[Account]()
    pickled = hg.ValueState[Any]()
    local = hg.ValueState[Annotated[datetime, msgspec.Meta(tz=False)]]()
    ratios = hg.ListState[float]()
    names = hg.MapState[str, int]()
    greatest = hg.ReducingState[int](max)
    mean = hg.AggregatingState[float, tuple[float, int], float](Mean())
    lasting = hg.ValueState[int](default=0, ttl=hg.StateTtl(FOR_EVER, update="read_and_write"))
    visits = hg.MapState[str, int](ttl=hg.StateTtl(FOR_EVER, time="event"))
    met = hg.OperatorListState[int]()
    subtasks = hg.OperatorListState[str](redistribution="union")
    rules = hg.BroadcastState[str, str]()

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def open(self, ctx: Any) -> None:
        self.first = True
        if not self.rules.contains("made by"):
            self.rules.put("made by", self.mark)
        if not self.subtasks.get():
            self.subtasks.add(f"{self.mark} {ctx.subtask_index}")

    def on_record(self, record: Any, ctx: hg.Context[int]) -> Iterator[dict[str, Any]]:
        if self.first:
            self.first = False
            yield {
                "opened by": self.mark,
                "met": self.met.get(),
                "subtasks": sorted(self.subtasks.get()),
                "rules": dict(self.rules.items()),
            }
        if not self.total.exists():
            self.met.add(ctx.key)
        self.total.set(self.total.get() + (record.number or 0))
        account = self.account.get() or Account(0, Decimal(0))
        account.count += 1
        account.spent += record.price or Decimal(0)
        account.last, account.label = record.at, record.name
        self.account.set(account)
        self.pickled.set(complex(account.count, self.total.get()))
        self.local.set(record.at.replace(tzinfo=None))
        if record.ratio is not None:
            self.ratios.update([*self.ratios.get()[-2:], record.ratio])
            self.mean.add(record.ratio)
        name = record.name or "nobody"
        self.names.put(name, (self.names.get(name) or 0) + 1)
        self.visits.put(name, (self.visits.get(name) or 0) + 1)
        self.greatest.add(record.number or 0)
        self.lasting.set(self.lasting.get() + 1)
        if record.at < TOLD_FROM:
            return
        yield {
            "id": ctx.key,
            "total": self.total.get(),
            "n": account.count,
            "spent": str(account.spent),
            "last": account.last.isoformat(),
            "label": account.label,
            "pickled": str(self.pickled.get()),
            "local": self.local.get().isoformat(),
            "ratios": self.ratios.get(),
            "mean": self.mean.get() if self.ratios.get() else None,
            "names": dict(sorted(self.names.items())),
            "visits": dict(sorted(self.visits.items())),
            "greatest": self.greatest.get(),
            "lasting": self.lasting.get(),
        }


AGGREGATES = {
    "n": hg.count(),
    "numbers": hg.count("number"),
    "number_sum": hg.sum("number"),
    "number_min": hg.min("number"),
    "number_max": hg.max("number"),
    "ratio_sum": hg.sum("ratio"),
    "ratio_max": hg.max("ratio"),
    "ratio_avg": hg.avg("ratio"),
    "price_sum": hg.sum("price"),
    "price_min": hg.min("price"),
}


class Outputs:
    """The sinks of a job, and what came into them, as JSON values."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.process, self.reduce, self.running, self.everything = (
            collect(guarantee="exactly_once") for _ in range(4)
        )

    def rows(self) -> dict[str, list[Any]]:
        """Return the visible output of each sink, in an order that does not depend on subtasks."""
        import pyarrow.parquet as pq

        files = sorted(self.directory.glob("*.parquet"))
        found = {
            "process": newest([row for row in self.process.rows if "id" in row], "id"),
            "reduce": self.reduce.rows,
            "running": newest(self.running.rows, "name"),
            "everything": self.everything.rows,
            "windows": [row for file in files for row in pq.read_table(file).to_pylist()],
        }
        return {name: in_order(rows) for name, rows in found.items()}


def newest(rows: list[dict[str, Any]], *keys: str) -> list[dict[str, Any]]:
    """The last result of each key: how many come before depends on how records are cut into batches."""
    last: dict[Any, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: row["n"]):
        last[tuple(row[key] for key in keys)] = row
    return list(last.values())


def in_order(rows: list[Any]) -> list[Any]:
    """Rows as JSON values, sorted by their text."""
    plain = [msgspec.json.decode(msgspec.json.encode(row, order="sorted")) for row in rows]
    return sorted(plain, key=lambda row: msgspec.json.encode(row, order="sorted"))


def make_job(
    directory: Path,
    outputs: Outputs,
    *,
    parallelism: int,
    mark: str,
    storage: str | None,
    rate: float = 1e6,
    name: str = NAME,
) -> hg.Job:
    """The job over `directory/input`, both sides of a savepoint."""
    job = hg.Job(name, parallelism=parallelism, max_parallelism=KEY_GROUPS)
    if storage is not None:
        job.checkpoint(every="1h", storage=storage)
    source = csv_source(str(directory / "input"), EVENTS, batch_rows=3)
    events = job.read(throttle(source, rate), name="events")
    events = events.event_time("at", max_out_of_order=LAST_FIRST)
    events.key_by("id").process(Everything(mark), name="process").write(
        outputs.process, name="process-out"
    )
    numbers = events.map(lambda row: (row.id, row.name, row.number or 0, [row.name]))
    numbers.key_with(lambda record: record[:2]).reduce(
        lambda one, other: (*one[:2], one[2] + other[2], (one[3] + other[3])[-3:]), name="reduce"
    ).write(outputs.reduce, name="reduce-out")
    events.key_by("name").agg(name="running", **AGGREGATES).write(
        outputs.running, name="running-out"
    )
    events.window(hg.tumbling("10m")).agg(n=hg.count(), top=hg.max("price"), name="all").write(
        outputs.everything, name="all-out"
    )
    events.key_by("id").window(hg.tumbling("5m")).agg(
        name="windows", name_max=hg.max("name"), **AGGREGATES
    ).write(parquet_sink(str(outputs.directory), guarantee="exactly_once"), name="windows-out")
    return job
