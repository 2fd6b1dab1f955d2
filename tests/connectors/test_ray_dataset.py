"""A Ray Dataset is computed once per run, and its rows are then read exactly. Here Ray is a fake."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import headgate as hg
from headgate.connectors import collect, ray_dataset_source
from headgate.connectors.files.locations import s3_client
from headgate.connectors.ray_data.result import ResultWriter
from headgate.errors import BadRecordError, PlanError, SourceError, UsageError
from headgate.runtime.job import runnable
from headgate.testing.connectors import Check, read_all, source_checks
from headgate.tests.support.ray_datasets import FakeDataset, RayDatasetCase, prepared, running

SCHEMA = {"id": "long"}


def rows_of(source: Any, storage: Path) -> list[dict[str, Any]]:
    async def read() -> list[Any]:
        return await read_all(await prepared(source, storage))

    return asyncio.run(read())


def blocks(*tables: dict[str, Any]) -> FakeDataset:
    return FakeDataset([pa.table(table) for table in tables])


def ids(*counts: int) -> FakeDataset:
    """A dataset of numbers from 0 on, in blocks of these sizes."""
    made, first = [], 0
    for count in counts:
        made.append(pa.table({"id": pa.array(range(first, first + count), pa.int64())}))
        first += count
    return FakeDataset(made)


# -- columns ----------------------------------------------------------------------------------------


def test_a_dataset_says_its_columns_in_plain_types() -> None:
    words = pa.array(["a"]).dictionary_encode()
    large = pa.array(["b"], pa.large_string())
    nested = pa.array([["c"]], pa.large_list(pa.large_string()))
    source = ray_dataset_source(blocks({"w": words, "l": large, "n": nested}))
    assert source.schema is not None
    assert source.schema.types == [pa.string(), pa.string(), pa.list_(pa.string())]
    assert source.describe() == "ray_dataset(dataset)"


def test_plain_types_are_read(tmp_path: Path) -> None:
    words = pa.array(["a", None]).dictionary_encode()
    nested = pa.array([["c"], None], pa.large_list(pa.large_string()))
    source = ray_dataset_source(blocks({"w": words, "n": nested}))
    assert rows_of(source, tmp_path) == [{"w": "a", "n": ["c"]}, {"w": None, "n": None}]


def test_blocks_may_differ_as_far_as_the_schema_allows(tmp_path: Path) -> None:
    dataset = blocks(
        {"x": ["unwanted"], "id": pa.array([1], pa.int32())},
        {"id": pa.array([2], pa.int64()), "x": [None]},
        {"id": pa.nulls(1), "x": [1.5]},
    )
    source = ray_dataset_source(dataset, SCHEMA)
    assert rows_of(source, tmp_path) == [{"id": 1}, {"id": 2}, {"id": None}]


@pytest.mark.parametrize(
    ("column", "type_"),
    [
        (pa.nulls(1), "null"),
        (pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64())), "map"),
        (pa.ExtensionArray.from_storage(pa.json_(), pa.array(["{}"])), "json"),
    ],
)
def test_a_type_without_a_column_form_is_refused_with_the_column(column: Any, type_: str) -> None:
    with pytest.raises(PlanError, match=f"column=`c` type=`.*{type_}") as caught:
        ray_dataset_source(blocks({"c": column}))
    assert "drop_columns" in caught.value.fix


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (blocks({"ids": [1]}), "no such column column=`id`"),
        (blocks({"id": ["text"]}), "another type than the schema says column=`id`"),
    ],
)
def test_a_block_that_does_not_fit_fails_with_the_line(
    dataset: FakeDataset, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        rows_of(ray_dataset_source(dataset, SCHEMA), tmp_path)
    assert caught.value.where == "job.py:7"
    assert not list(tmp_path.rglob("*.parquet"))


def test_a_row_that_does_not_fit_is_a_bad_record(tmp_path: Path) -> None:
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False)])
    dataset = blocks({"id": [1, None, 3]})
    with pytest.raises(BadRecordError):
        rows_of(ray_dataset_source(dataset, schema), tmp_path / "a")
    dropping = ray_dataset_source(dataset, schema, on_bad_record="drop")
    assert rows_of(dropping, tmp_path / "b") == [{"id": 1}, {"id": 3}]


# -- arguments --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dataset": [1, 2]}, "not a Ray Dataset"),
        ({"dataset": FakeDataset}, "not a Ray Dataset"),
        ({"dataset": lambda: None}, "needs a schema"),
        ({"dataset": blocks(), "schema": None}, "has no columns"),
        ({"dataset": ids(1), "split_bytes": "0b"}, "split_bytes"),
        ({"dataset": ids(1), "batch_rows": 0}, "batch_rows"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ray_dataset_source(**arguments)


def test_a_job_without_storage_is_refused() -> None:
    job = hg.Job("j")
    job.read(ray_dataset_source(ids(1)), name="in").write(collect(), name="out")
    with pytest.raises(UsageError, match="storage"):
        job.run()


def test_a_function_must_return_a_dataset_and_its_error_has_the_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="returned `list`"):
        rows_of(ray_dataset_source(lambda: [1], SCHEMA), tmp_path)

    def fails() -> Any:
        raise ValueError("no such bucket")

    with pytest.raises(SourceError, match="dataset=`fails`: ValueError: no such bucket") as caught:
        rows_of(ray_dataset_source(fails, SCHEMA), tmp_path)
    assert caught.value.where == "job.py:7"


def test_an_error_of_ray_is_that_of_the_source_and_leaves_nothing(tmp_path: Path) -> None:
    def two_blocks() -> Iterator[pa.Table]:
        yield pa.table({"id": [1]})
        first = "ray::map()\n  in task\nZeroDivisionError: division by zero\n"
        raise RuntimeError(
            f"{first}\nray::map()\nray.UserCodeException: failed\nTo retry, set more"
        )

    dataset = SimpleNamespace(schema=lambda: None, iter_batches=lambda **_: two_blocks())
    with pytest.raises(SourceError, match="RuntimeError: ZeroDivisionError: division by zero"):
        rows_of(ray_dataset_source(lambda: dataset, SCHEMA), tmp_path)
    assert not list(tmp_path.rglob("*.parquet"))


# -- once -------------------------------------------------------------------------------------------


def test_a_run_computes_once_and_a_new_run_again(tmp_path: Path) -> None:
    made: list[int] = []

    def dataset() -> FakeDataset:
        made.append(1)
        return ids(3, 2)

    async def twice(run: str) -> tuple[list[bytes], list[bytes], list[str]]:
        async with running(tmp_path, run) as (context, said):
            source = ray_dataset_source(dataset, SCHEMA)
            first, again = await source.prepare(context), await source.prepare(context)
            return first.splits(1), again.splits(4), said

    first, again, said = asyncio.run(twice("r1"))
    assert first == again
    assert said == [
        "Ray is done: 5 rows in 1 files",
        "takes the result that Ray made before (5 rows)",
    ]
    before = set(tmp_path.rglob("*.parquet"))
    asyncio.run(twice("r2"))
    assert len(made) == 2
    assert not before & set(tmp_path.rglob("*.parquet")), "the older result goes"


def test_workers_carry_the_dataset_and_never_load_it(tmp_path: Path) -> None:
    class Loaded(FakeDataset):
        def __reduce__(self) -> Any:
            return pytest.fail, ("loaded",)

    source = pickle.loads(pickle.dumps(ray_dataset_source(Loaded([pa.table({"id": [1]})]))))
    assert source.schema.names == ["id"]
    again = pickle.loads(pickle.dumps(ray_dataset_source(ids(2))))
    assert rows_of(pickle.loads(pickle.dumps(again)), tmp_path) == [{"id": 0}, {"id": 1}]


def test_a_dataset_that_cannot_be_sent_is_refused() -> None:
    class Fixed(FakeDataset):
        def __reduce__(self) -> Any:
            raise TypeError("bound to this process")

    with pytest.raises(UsageError, match="bound to this process") as caught:
        pickle.dumps(ray_dataset_source(Fixed([pa.table({"id": [1]})])))
    assert "function" in caught.value.fix


def test_an_empty_dataset_has_no_rows(tmp_path: Path) -> None:
    assert rows_of(ray_dataset_source(ids(), SCHEMA), tmp_path / "a") == []
    assert rows_of(ray_dataset_source(ids(0, 0), SCHEMA), tmp_path / "b") == []


BEGUN, GO_ON, TAKEN = threading.Event(), threading.Event(), list[int]()


def endless() -> Any:
    """A dataset whose first block comes when it is told to."""

    def blocks(**_: Any) -> Iterator[pa.Table]:
        while True:
            TAKEN.append(1)
            BEGUN.set()
            GO_ON.wait(30)
            yield pa.table({"id": [1]})

    return SimpleNamespace(schema=lambda: None, iter_batches=blocks)


def test_a_cancelled_run_reads_no_further_block_and_leaves_nothing(tmp_path: Path) -> None:
    async def cancel() -> None:
        async with running(tmp_path, "r1") as (context, _):
            source = ray_dataset_source(endless, SCHEMA)
            preparing = asyncio.create_task(source.prepare(context))
            await asyncio.to_thread(BEGUN.wait, 30)
            preparing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await preparing
            GO_ON.set()

    asyncio.run(cancel())
    for thread in threading.enumerate():
        if thread.name == "headgate-ray-dataset":
            thread.join(30)
    assert TAKEN == [1]
    assert not list(tmp_path.rglob("*.parquet"))


# -- files ------------------------------------------------------------------------------------------


def test_row_groups_and_files_have_the_size_that_is_wanted(tmp_path: Path) -> None:
    writer = ResultWriter(tmp_path, group_bytes=800, file_bytes=2_000)
    files = [
        path
        for size in (10, 10, 1_000, 10, 400)
        for path in writer.write(pa.table({"id": pa.array(range(size), pa.int64())}))
    ]
    files += list(writer.end(pa.schema({"id": pa.int64()})))
    groups = []
    for path in files:
        metadata = pq.read_metadata(path)
        groups.append([metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)])
    assert sum(map(sum, groups)) == 1_430
    assert all(sum(group) * 8 <= 2_000 + 1_600 for group in groups)
    assert max(map(max, groups)) * 8 <= 1_600
    assert [path.name for path in files] == [f"part-{n:05}.parquet" for n in range(len(files))]
    assert len(files) > 3


# -- jobs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parallelism", [1, 3])
def test_a_restart_reads_on_and_computes_nothing(tmp_path: Path, parallelism: int) -> None:
    failed, computed = tmp_path / "failed", tmp_path / "computed"

    def dataset() -> FakeDataset:
        with computed.open("a") as file:
            file.write("once\n")
        return ids(30, 40, 30)

    def fail_once(row: Any) -> Any:
        if row.id == 70 and not failed.exists():
            failed.touch()
            raise ValueError("once")
        return {"id": row.id}

    job = hg.Job("j", parallelism=parallelism)
    job.checkpoint(every="1h", storage=str(tmp_path / "ck"))
    job.restart(1, delay="0s")
    sink = collect(guarantee="exactly_once")
    source = ray_dataset_source(dataset, SCHEMA, split_bytes="100b", batch_rows=5)
    job.read(source, name="in").map(fail_once, into=pa.schema({"id": pa.int64()})).write(
        sink, name="out"
    )
    assert job.run().status == "FINISHED"
    assert failed.exists()
    assert sorted(row["id"] for row in sink.rows) == list(range(100))
    assert computed.read_text() == "once\n"
    assert not list((tmp_path / "ck").rglob("*.parquet")), "it goes with the job's end"


def test_the_rows_go_to_s3_and_come_from_there(s3_server: Any, tmp_path: Path) -> None:
    failed = tmp_path / "failed"

    def fail_once(row: Any) -> Any:
        if row.id == 70 and not failed.exists():
            failed.touch()
            raise ValueError("once")
        return {"id": row.id}

    job = hg.Job("j", parallelism=2, options={"io.tmp.dirs": str(tmp_path / "tmp")})
    job.checkpoint(every="1h", storage=s3_server.uri)
    job.restart(1, delay="0s")
    runnable(job).override(s3_server.options)
    sink = collect(guarantee="exactly_once")
    options: dict[str, Any] = {"split_bytes": "100b", "batch_rows": 5, "keep_result": True}
    source = ray_dataset_source(ids(30, 40, 30), SCHEMA, **options)
    job.read(source, name="in").map(fail_once, into=pa.schema({"id": pa.int64()})).write(
        sink, name="out"
    )
    assert job.run().status == "FINISHED"
    assert failed.exists()
    assert sorted(row["id"] for row in sink.rows) == list(range(100))
    found = s3_client(s3_server.options).list_objects_v2(
        Bucket=s3_server.bucket, Prefix="checkpoints/j/sources/in-"
    )
    kept = [item["Key"].rpartition("/")[2] for item in found["Contents"]]
    assert sorted(kept) == ["part-00000.parquet", "result.json"]
    assert not list((tmp_path / "tmp").rglob("*.parquet"))


@pytest.mark.parametrize(
    "check",
    [each for each in source_checks() if each.applies_to(RayDatasetCase)],
    ids=lambda check: check.name,
)
def test_it_keeps_the_promise(check: Check[Any]) -> None:
    asyncio.run(check.run(RayDatasetCase()))
