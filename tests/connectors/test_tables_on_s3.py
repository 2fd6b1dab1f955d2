"""Delta and Iceberg tables on S3: a real server over a directory (versitygw)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyiceberg.catalog import load_catalog

import headgate as hg
from headgate.connectors import delta_sink, from_list, iceberg_sink
from headgate.connectors.delta.table import DeltaVersion, object_store_options
from headgate.errors import StorageError
from headgate.operators.sink import Sink
from headgate.testing.servers import versitygw

ROWS = [{"n": n, "who": f"user {n % 3}"} for n in range(40)]
DELTA = f"s3://{versitygw.BUCKET}/lake/orders"
WRONG = "no-secret-of-ours"

pytestmark = [
    pytest.mark.server,
    pytest.mark.timeout(versitygw.BUILD_S_MAX + 300),
]


def catalog_of(directory: Path) -> dict[str, str]:
    return {
        "uri": f"sqlite:///{directory}/catalog.db",
        "warehouse": f"s3://{versitygw.BUCKET}/warehouse",
    }


def sink_of(format: str, directory: Path, **options: Any) -> Sink:
    if format == "delta":
        return delta_sink(DELTA, partition_by="who", **options)
    return iceberg_sink("shop.orders", catalog=catalog_of(directory), partition_by="who", **options)


def rows_of(format: str, directory: Path, options: dict[str, str]) -> list[dict[str, Any]]:
    if format == "delta":
        table = DeltaTable(DELTA, storage_options=object_store_options(options))
        return list(table.to_pyarrow_table(columns=["n", "who"]).to_pylist())
    reader = {"s3.endpoint": options["s3.endpoint"], "s3.region": options["s3.region"]}
    with load_catalog("default", **catalog_of(directory), **reader) as catalog:
        return list(catalog.load_table("shop.orders").scan().to_arrow().to_pylist())


def job_of(directory: Path, sink: Sink) -> hg.Job:
    job = hg.Job("lake", parallelism=2)
    job.checkpoint(every="1h", storage=directory / "checkpoints")
    schema = pa.schema([("n", pa.int64()), ("who", pa.string())])
    job.read(from_list(ROWS, schema=schema, splits=2), name="items").write(sink, name="table")
    return job


@pytest.mark.parametrize("format", ["delta", "iceberg"])
def test_a_table_on_s3_has_each_row_once(
    format: str, gateway: dict[str, str], tmp_path: Path
) -> None:
    job_of(tmp_path, sink_of(format, tmp_path, storage_options=gateway)).run()
    found = rows_of(format, tmp_path, gateway)
    assert sorted(found, key=lambda row: row["n"]) == ROWS
    again = sink_of(format, tmp_path, storage_options=gateway, if_exists="append")
    job_of(tmp_path, again).run(fresh=True)
    assert len(rows_of(format, tmp_path, gateway)) == 2 * len(ROWS)


def test_deleted_files_of_a_delta_table_are_noticed(
    gateway: dict[str, str], tmp_path: Path
) -> None:
    job_of(tmp_path, sink_of("delta", tmp_path, storage_options=gateway)).run()
    options = object_store_options(gateway)
    version = DeltaVersion(DELTA, options, pa.schema([]), ())
    (there, *_) = (
        uri.removeprefix(f"{DELTA}/")
        for uri in DeltaTable(DELTA, storage_options=options).file_uris()
    )
    assert version.missing([there, "no.parquet"]) == ["no.parquet"]


@pytest.mark.parametrize("format", ["delta", "iceberg"])
def test_wrong_credentials_are_an_error_that_does_not_show_them(
    format: str, gateway: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", WRONG)
    job = job_of(tmp_path, sink_of(format, tmp_path, storage_options=gateway))
    assert WRONG not in job.explain()
    with pytest.raises(StorageError) as found:
        job.run()
    assert WRONG not in str(found.value)
