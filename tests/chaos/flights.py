"""The flights of a year over and over, and what the job makes of them, by a batch computation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from headgate.tests.support.modules import load

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
YEAR_MS = 365 * 24 * 3_600_000
ROW_GROUPS = 16


@dataclass(frozen=True)
class Verdict:
    """The output of a job beside the right answer."""

    flights: int
    """Flights that were read, by the right answer."""
    windows: int
    lost: int
    """Flights that are in no window of the output."""
    doubled: int
    """Flights that are in the output more than once."""
    wrong: int
    """Windows with the right number of flights, and another value; or that should not be there."""

    @property
    def exact(self) -> bool:
        return self.lost == self.doubled == self.wrong == 0


def write_years(directory: Path, flights: int) -> int:
    """Write this number of flights or somewhat more, a file per year; return the number."""
    year = load(EXAMPLES / "make_flights.py").flights()
    directory.mkdir(parents=True)
    at = year.schema.get_field_index("time_hour")
    field, first = year.schema.field(at), year["time_hour"].cast(pa.int64()).to_numpy()
    years = -(-flights // year.num_rows)
    for number in range(years):
        hours = pa.array(first + number * YEAR_MS).cast(field.type)
        pq.write_table(
            year.set_column(at, field, hours),
            directory / f"flights-{number:04d}.parquet",
            row_group_size=-(-year.num_rows // ROW_GROUPS),
        )
    return years * year.num_rows


def verdict(flights: Path, results: Path) -> Verdict:
    """Compare what a job wrote below `results` with a computation over the files in `flights`."""
    with duckdb.connect() as database:
        row = database.execute(
            f"""
            with answer as (
                select origin, time_hour as hour, count(*) as flights,
                       avg(dep_delay) as mean, max(dep_delay) as worst
                from '{flights}/*.parquet' group by all
            ), output as (
                select origin, window_start as hour, sum(flights) as flights,
                       min(mean_delay) as mean, min(worst_delay) as worst
                from '{results}/*.parquet' group by all
            )
            select coalesce(sum(a.flights), 0), count(a.flights),
                   coalesce(sum(greatest(a.flights - coalesce(o.flights, 0), 0)), 0),
                   coalesce(sum(greatest(coalesce(o.flights, 0) - a.flights, 0)), 0),
                   count(*) filter (a.flights is null or (a.flights = o.flights and not (
                       a.worst is not distinct from o.worst
                       and (a.mean is null) = (o.mean is null)
                       and coalesce(abs(a.mean - o.mean), 0) < 1e-9)))
            from answer a full join output o using (origin, hour)
            """
        ).fetchone()
    assert row is not None
    return Verdict(*map(int, row))
