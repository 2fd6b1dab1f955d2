"""Misspelt addresses are errors at plan time, not names of local directories."""

from __future__ import annotations

from pathlib import Path

import pytest

import headgate as hg
from headgate.connectors import csv_source, parquet_sink
from headgate.errors import PlanError, UsageError
from headgate.runtime.storage.open_store import open_store

MISSPELT = {
    "s3:/bucket/x": "write `s3://bucket/x`",
    "s3:bucket/x": "write `s3://bucket/x`",
    "s3//bucket/x": "write `s3://bucket/x`",
    "S3://bucket/x": "write `s3://bucket/x`",
    "s3:///bucket/x": "write `s3://bucket/x`",
    "file:/data/x": "write `file:///data/x`",
    "File:///data/x": "write `file:///data/x`",
    "gs://bucket/x": "an address that begins with one of file://",
    "gs:/bucket/x": "an address that begins with one of file://",
    "hdfs://node/x": "an address that begins with one of file://",
    "nonsense://x": "an address that begins with one of file://",
}


@pytest.mark.parametrize("address", MISSPELT)
def test_what_is_misspelt_is_refused_with_the_right_form(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PlanError) as planned:
        hg.Job("j").checkpoint(every="1s", storage=address)
    assert MISSPELT[address] in planned.value.fix
    assert "test_addresses.py" in planned.value.where
    for use in (
        lambda: open_store(address, "j", {}),
        lambda: csv_source(address, {"n": int}),
        lambda: parquet_sink(address, guarantee="none"),
    ):
        with pytest.raises(UsageError) as refused:
            use()
        assert MISSPELT[address] in refused.value.fix
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "address",
    [
        "x",
        "/x/y",
        "./s3:/x",
        "~/x",
        "file:///x",
        "s3://b/x",
        "s3a://b/x",
        "memory://x",
        "s3/x",
        "a:b",
    ],
)
def test_what_is_an_address_is_none_of_them(address: str) -> None:
    hg.Job("j").checkpoint(every="1s", storage=address)
