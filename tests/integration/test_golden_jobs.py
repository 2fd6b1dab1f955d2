"""Whole jobs in process: at parallelism 1 to 3, with and without failures, results equal the reference."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.dataset as ds
import pytest

import headgate as hg
from headgate.connectors import (
    collect,
    csv_sink,
    from_list,
    function_sink,
    generator,
    json_sink,
    numbers,
    parquet_sink,
    random_int,
    sequence,
)

ROWS = 1000
RATE = 2000
BLOCK = 20
FAULTS = ["none", "kills", "user", "takeovers"]


def make_job(lab: Any, parallelism: int, name: str = "golden") -> hg.Job:
    job = hg.Job(name, parallelism=parallelism, max_parallelism=12)
    job.checkpoint(every="50ms", storage=lab.storage)
    job.restart(attempts=20, delay="10ms")
    return job


def go(
    lab: Any,
    faults: Any,
    job: hg.Job,
    fault: str,
    seed: int = 1,
    checkpoints: int = 0,
    **options: Any,
) -> Any:
    """Run `job` for this number of checkpoints; assert that it finished, and failed as the fault says."""
    scripts = {"kills": faults.kills(seed, 3), "takeovers": faults.takeovers(2)}

    async def script(running: Any) -> None:
        if fault in scripts:
            await scripts[fault](running)
        await faults.none(checkpoints)(running)

    ran = lab.run(job, script, **options)
    assert ran.outcome.status == "FINISHED", ran.failures
    expected = {"none": 0, "kills": 3, "user": 1, "takeovers": 0}[fault]
    assert len(ran.failures) == expected, ran.failures
    assert ran.job.takeovers == (2 if fault == "takeovers" else 0)
    assert not lab.state_files("golden")
    return ran


def rate_of(fault: str) -> float | None:
    """Faults need time to happen in."""
    return None if fault == "none" else RATE


def source(fault: str, splits: int = 6, rows: int = ROWS) -> Any:
    return numbers(rows, rate=rate_of(fault), batch_rows=BLOCK, splits=splits)


def marker(raising: Any, path: Path, fault: str) -> Callable[[Any], Any]:
    """An identity map that raises once in the middle, if the fault says so."""
    marked = ROWS // 2 if fault == "user" else -1
    where = str(path / "raised")
    return lambda record: raising(where, record, marked)


def assert_in_order(found: dict[int, list[int]], splits: int, parallelism: int) -> None:
    """No sink subtask sees the numbers of one source subtask out of order."""
    for values in found.values():
        last: dict[int, int] = defaultdict(lambda: -1)
        for value in values:
            sender = value // BLOCK % splits % parallelism
            assert value > last[sender]
            last[sender] = value


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("parallelism", [1, 2, 3])
def test_objects_pass_through(
    lab: Any, faults: Any, raising: Any, by_subtask: Any, parallelism: int, fault: str
) -> None:
    job = make_job(lab, parallelism)
    stream = job.read(source(fault), name="numbers").map(marker(raising, lab.path, fault))
    stream = stream.filter(lambda n: n % 2 == 0).flat_map(lambda n: [n, n + 1])
    stream.write(collect(path=str(lab.path / "out"), guarantee="exactly_once"), name="out")
    go(lab, faults, job, fault, seed=parallelism)
    found = by_subtask(lab.path / "out")
    assert sorted(sum(found.values(), [])) == list(range(ROWS))
    assert_in_order(found, 6, parallelism)


@pytest.mark.parametrize("fault", ["none", "kills"])
@pytest.mark.parametrize("parallelism", [1, 2, 3])
def test_expressions(lab: Any, faults: Any, parallelism: int, fault: str) -> None:
    job = make_job(lab, parallelism)
    rows = generator(
        {"n": sequence(), "k": random_int(0, 10)}, rows=ROWS, rate=rate_of(fault), batch_rows=BLOCK
    )
    stream = job.read(rows, name="rows").filter("n % 3 = 0").select("n", "n * 2 AS m", "k")
    sink = collect(guarantee="exactly_once")
    stream.rebalance().write(sink, name="out")
    go(lab, faults, job, fault, seed=parallelism)
    assert sorted((r["n"], r["m"]) for r in sink.rows) == [(n, 2 * n) for n in range(0, ROWS, 3)]
    assert {r["k"] for r in sink.rows} == set(range(10))


PARTITIONERS: dict[str, Callable[[hg.Stream[int]], hg.Stream[int]]] = {
    "rebalance": lambda s: s.rebalance(),
    "rescale": lambda s: s.rescale(),
    "shuffle": lambda s: s.shuffle(),
    "broadcast": lambda s: s.broadcast(),
    "to_one": lambda s: s.to_one(),
    "custom": lambda s: s.partition_with(lambda n, parallelism: n // 7 % parallelism),
}


@pytest.mark.parametrize("fault", ["none", "kills"])
@pytest.mark.parametrize("parallelism", [3])
@pytest.mark.parametrize("partitioner", PARTITIONERS)
def test_partitioner(
    lab: Any, faults: Any, by_subtask: Any, partitioner: str, parallelism: int, fault: str
) -> None:
    rows = ROWS // 2
    job = make_job(lab, parallelism)
    stream = PARTITIONERS[partitioner](job.read(source(fault, rows=rows), name="numbers"))
    stream = stream.map(lambda n: n)
    if partitioner == "to_one":
        stream = stream.parallel(1)
    stream.write(
        collect(path=str(lab.path / "out"), guarantee="exactly_once"),
        name="out",
        parallelism=1 if partitioner == "to_one" else None,
    )
    go(lab, faults, job, fault, seed=parallelism, unix=True)
    found = by_subtask(lab.path / "out")
    copies = parallelism if partitioner == "broadcast" else 1
    assert Counter(sum(found.values(), [])) == dict.fromkeys(range(rows), copies)
    assert_in_order(found, 6, parallelism)
    assert len(found) == (1 if partitioner == "to_one" else parallelism)
    if partitioner == "custom":
        for subtask, values in found.items():
            assert {value // 7 % parallelism for value in values} == {subtask}


@pytest.mark.parametrize(("wide", "narrow"), [(3, 1), (1, 3), (3, 2), (2, 3)])
def test_rescale_between_widths(
    lab: Any, faults: Any, by_subtask: Any, wide: int, narrow: int
) -> None:
    job = make_job(lab, max(wide, narrow))
    stream = job.read(source("kills", rows=ROWS // 2), name="numbers", parallelism=wide)
    stream.rescale().map(lambda n: n).parallel(narrow).write(
        collect(path=str(lab.path / "out"), guarantee="exactly_once"),
        name="out",
        parallelism=narrow,
    )
    go(lab, faults, job, "kills", seed=wide)
    found = by_subtask(lab.path / "out")
    assert sorted(sum(found.values(), [])) == list(range(ROWS // 2))
    assert len(found) == narrow
    assert_in_order(found, 6, wide)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("parallelism", [1, 3])
def test_reduce(lab: Any, faults: Any, raising: Any, parallelism: int, fault: str) -> None:
    job = make_job(lab, parallelism)
    sink = collect(guarantee="exactly_once")
    mark = marker(raising, lab.path, fault)
    (
        job.read(source(fault), name="numbers")
        .map(lambda n: (n % 7, 1, mark(n)))
        .key_with(lambda pair: pair[0])
        .reduce(lambda a, b: (a[0], a[1] + b[1], max(a[2], b[2])), name="count")
        .write(sink, name="out")
    )
    go(lab, faults, job, fault, seed=parallelism)
    # One output per record, and the k-th of a key counts k: nothing lost, nothing twice.
    by_key: dict[int, list[int]] = defaultdict(list)
    for key, count, _ in sink.rows:
        by_key[key].append(count)
    sizes = Counter(n % 7 for n in range(ROWS))
    assert {key: sorted(counts) for key, counts in by_key.items()} == {
        key: list(range(1, size + 1)) for key, size in sizes.items()
    }


@pytest.mark.parametrize("fault", ["none", "kills", "takeovers"])
@pytest.mark.parametrize("parallelism", [1, 3])
def test_running_aggregate(lab: Any, faults: Any, parallelism: int, fault: str) -> None:
    job = make_job(lab, parallelism)
    rows = generator(
        {"n": sequence(), "k": random_int(0, 5)}, rows=ROWS, rate=rate_of(fault), batch_rows=BLOCK
    )
    sink = collect(guarantee="exactly_once")
    job.read(rows, name="rows").key_by("k").agg(
        c=hg.count(), total=hg.sum("n"), top=hg.max("n"), name="totals"
    ).write(sink, name="out")
    go(lab, faults, job, fault, seed=parallelism)
    last: dict[int, Any] = {}
    seen: set[tuple[int, int]] = set()
    for row in sink.rows:
        assert (row["k"], row["c"]) not in seen
        seen.add((row["k"], row["c"]))
        if row["c"] > last.get(row["k"], {"c": 0})["c"]:
            last[row["k"]] = row
    assert sum(row["c"] for row in last.values()) == ROWS
    assert sum(row["total"] for row in last.values()) == sum(range(ROWS))
    assert max(row["top"] for row in last.values()) == ROWS - 1


@pytest.mark.parametrize("fault", ["none", "kills", "takeovers"])
@pytest.mark.parametrize("parallelism", [1, 2, 3])
def test_window_aggregate_with_late_records(
    lab: Any, faults: Any, parallelism: int, fault: str
) -> None:
    job = make_job(lab, parallelism)
    job.options["pipeline.auto-watermark-interval"] = "0 ms"
    rows = generator({"n": sequence()}, rows=ROWS, rate=rate_of(fault), batch_rows=BLOCK)
    # Record n happens at n ms; from the middle on every 50th claims to be from the first window.
    stream = job.read(rows, name="rows").select(
        "n", "n % 3 AS k", "CASE WHEN n > 500 AND n % 50 = 0 THEN 0 ELSE n END AS ts"
    )
    windows = (
        stream.event_time("ts", max_out_of_order="0s")
        .key_by("k")
        .window(hg.tumbling("100ms"))
        .agg(c=hg.count(), s=hg.sum("n"), name="windows")
    )
    sink, late = collect(guarantee="exactly_once"), collect(guarantee="exactly_once")
    windows.write(sink, name="out")
    windows.late.write(late, name="late")
    go(lab, faults, job, fault, seed=parallelism)
    times = {n: 0 if n > 500 and n % 50 == 0 else n for n in range(ROWS)}
    expected = Counter((n % 3, ts // 100) for n, ts in times.items())
    found: Counter[tuple[int, int]] = Counter()
    for row in sink.rows:
        window = int(row["window_start"].timestamp() * 1000) // 100
        found[row["k"], window] += row["c"]
        if window > 0:  # the first may fire twice: late by then only, after a restore
            assert row["c"] == expected[row["k"], window]
    assert {row["n"] for row in late.rows} <= {n for n in range(ROWS) if n > 500 and n % 50 == 0}
    assert late.rows
    for row in late.rows:
        found[row["k"], 0] += 1
    assert found == expected
    total = sum(row["s"] for row in sink.rows) + sum(row["n"] for row in late.rows)
    assert total == sum(range(ROWS))


@pytest.mark.parametrize("fault", ["none", "kills"])
@pytest.mark.parametrize("parallelism", [1, 3])
def test_union(lab: Any, faults: Any, parallelism: int, fault: str) -> None:
    job = make_job(lab, parallelism)
    one = job.read(source(fault), name="one")
    two = job.read(source(fault, rows=ROWS // 2), name="two").map(lambda n: -n - 1)
    sink = collect(guarantee="exactly_once")
    one.union(two).rebalance().map(lambda n: n).write(sink, name="out")
    go(lab, faults, job, fault, seed=parallelism)
    assert sorted(sink.rows) == list(range(-ROWS // 2, ROWS))


async def slowly(record: int) -> int:
    await asyncio.sleep(0.001 * (record % 4))
    return record


@pytest.mark.parametrize("fault", ["none", "kills"])
@pytest.mark.parametrize("parallelism", [1, 2])
def test_async_map_keeps_the_order(
    lab: Any, faults: Any, by_subtask: Any, parallelism: int, fault: str
) -> None:
    job = make_job(lab, parallelism)
    job.read(source(fault), name="numbers").map(slowly).write(
        collect(path=str(lab.path / "out"), guarantee="exactly_once"), name="out"
    )
    go(lab, faults, job, fault, seed=parallelism)
    found = by_subtask(lab.path / "out")
    assert sorted(sum(found.values(), [])) == list(range(ROWS))
    assert_in_order(found, 6, parallelism)


def test_side_outputs_of_a_source(lab: Any, faults: Any) -> None:
    from headgate.connectors import csv_source

    path = lab.path / "in.csv"
    lines = [f"{n},{n * 2}" if n % 10 else "not,numbers,at all" for n in range(1000)]
    path.write_text("n,m\n" + "\n".join(lines) + "\n")
    job = make_job(lab, 2)
    schema = pa.schema([("n", pa.int64()), ("m", pa.int64())])
    rows = job.read(csv_source(str(path), schema, on_bad_record="side_output"), name="rows")
    good, bad = collect(guarantee="exactly_once"), collect(guarantee="exactly_once")
    rows.rebalance().write(good, name="good")
    rows.rejected.rebalance().write(bad, name="bad")
    go(lab, faults, job, "none")
    assert sorted(row["n"] for row in good.rows) == [n for n in range(1000) if n % 10]
    assert len(bad.rows) == 100


FILE_SINKS = {"parquet": parquet_sink, "csv": csv_sink, "json": json_sink}


@pytest.mark.parametrize("fault", ["kills", "takeovers"])
@pytest.mark.parametrize("format", FILE_SINKS)
@pytest.mark.parametrize("parallelism", [2])
def test_file_sinks(lab: Any, faults: Any, format: str, parallelism: int, fault: str) -> None:
    job = make_job(lab, parallelism)
    rows = generator({"n": sequence()}, rows=ROWS, rate=RATE, batch_rows=BLOCK)
    sink = FILE_SINKS[format](str(lab.path / "out"), guarantee="exactly_once")
    job.read(rows, name="rows").rebalance().write(sink, name="out")
    ran = go(lab, faults, job, fault, seed=parallelism, checkpoints=4)
    table = ds.dataset(lab.path / "out", format=format).to_table()
    assert sorted(table["n"].to_pylist()) == list(range(ROWS))
    assert ran.completed > 3
    left = [p for p in (lab.path / "out" / ".headgate").rglob("*") if p.is_file()]
    assert not left


@pytest.mark.parametrize("fault", ["kills", "user"])
def test_several_subtasks_in_one_worker(
    lab: Any, faults: Any, raising: Any, by_subtask: Any, fault: str
) -> None:
    job = make_job(lab, 3)
    stream = job.read(source(fault), name="numbers").map(marker(raising, lab.path, fault))
    stream.shuffle().map(lambda n: n).write(
        collect(path=str(lab.path / "out"), guarantee="exactly_once"), name="out"
    )
    ran = go(lab, faults, job, fault, slots_per_worker=2)
    assert len(ran.job.cluster.workers) == (5 if fault == "kills" else 2)
    found = by_subtask(lab.path / "out")
    assert sorted(sum(found.values(), [])) == list(range(ROWS))
    assert_in_order(found, 6, 3)


def test_a_crash_marker_crashes_once(lab: Any) -> None:
    from headgate.connectors import Crash, Pause

    job = make_job(lab, 1)
    items = [1, 2, Pause("100ms"), 3, Crash(), 4]
    sink = collect(guarantee="exactly_once")
    job.read(from_list(items, batch_rows=1), name="items").write(sink, name="out")
    ran = lab.run(job)
    assert ran.outcome.status == "FINISHED"
    assert len(ran.failures) == 1
    assert sink.rows == [1, 2, 3, 4]


def test_at_least_once_loses_nothing(lab: Any, faults: Any) -> None:
    path = str(lab.path / "seen")

    def note(n: int) -> None:
        with open(path, "a") as file:
            file.write(f"{n}\n")

    job = make_job(lab, 2)
    job.read(source("kills"), name="numbers").rebalance().write(
        function_sink(note, guarantee="at_least_once"), name="out"
    )
    go(lab, faults, job, "kills")
    seen = [int(line) for line in Path(path).read_text().split()]
    assert set(seen) == set(range(ROWS))


class Pair(msgspec.Struct):
    n: int
    k: int

    def bucket(self) -> int:
        return self.k % 4


def test_key_and_partition_functions_get_the_users_class(lab: Any) -> None:
    job = make_job(lab, 3)
    items = [Pair(n, n % 10) for n in range(300)]
    pairs = job.read(from_list(items, schema=Pair, splits=3, batch_rows=10), name="pairs")
    sink = collect(guarantee="exactly_once")
    spread = pairs.partition_with(lambda p, parallelism: p.bucket() % parallelism)
    spread.map(lambda p: (p.bucket(), 1)).key_with(lambda r: r[0]).reduce(
        lambda a, b: (a[0], a[1] + b[1]), name="count"
    ).write(sink, name="out")
    ran = lab.run(job)
    assert ran.outcome.status == "FINISHED", ran.failures
    assert max(sink.rows) == (3, 60)
    assert len(sink.rows) == 300
