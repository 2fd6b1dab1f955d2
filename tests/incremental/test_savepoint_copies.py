"""A savepoint is copied to another directory or bucket, the original is deleted, and the copy restores."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config

from headgate.tests.support.lab import stop_with_savepoint


def finish(lab: Any, goods: Any, copy: str, options: dict[str, str]) -> None:
    """From the copy alone, at another parallelism; the job's own checkpoints are not looked at."""
    job = goods.job(hurried=True, parallelism=3, **options)
    ran = lab.run(job, restore_from=copy)
    assert ran.outcome.status == "FINISHED", ran.failures
    assert any(copy in text for text in ran.job.texts("restored"))
    goods.check()


@pytest.mark.parametrize(("backend", "native"), [("rocksdb", False)])
def test_to_another_directory(
    plain_lab: Any, goods_at: Any, tmp_path: Path, backend: str, native: bool
) -> None:
    taken: list[str] = []
    goods = goods_at(str(tmp_path / "checkpoints"), backend=backend)
    plain_lab.run(
        goods.job(),
        stop_with_savepoint(str(tmp_path / "saved"), taken, checkpoints=2, native=native),
    )
    copy = tmp_path / "elsewhere" / "under another name"
    shutil.copytree(taken[0], copy)
    shutil.rmtree(tmp_path / "saved")
    finish(plain_lab, goods, str(copy), {})


def move(client: Any, source: str, target_bucket: str, target_prefix: str) -> int:
    """Copy all objects below an address byte by byte, and delete the originals."""
    bucket, _, prefix = source.removeprefix("s3://").partition("/")
    moved = 0
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{prefix}/")
    for found in [found for page in pages for found in page.get("Contents", ())]:
        key = f"{target_prefix}/{found['Key'].removeprefix(prefix + '/')}"
        client.copy_object(
            Bucket=target_bucket, Key=key, CopySource={"Bucket": bucket, "Key": found["Key"]}
        )
        client.delete_object(Bucket=bucket, Key=found["Key"])
        moved += 1
    return moved


@pytest.mark.server
@pytest.mark.parametrize(("backend", "native"), [("hashmap", False), ("rocksdb", True)])
def test_to_another_bucket(
    plain_lab: Any, goods_at: Any, s3_server: Any, backend: str, native: bool
) -> None:
    taken: list[str] = []
    options = s3_server.options
    goods = goods_at(plain_lab.storage, backend=backend, every="50ms")
    target = f"s3://{s3_server.bucket}/saved"
    plain_lab.run(
        goods.job(**options), stop_with_savepoint(target, taken, checkpoints=2, native=native)
    )
    client = boto3.client(
        "s3",
        endpoint_url=s3_server.endpoint,
        config=Config(s3={"addressing_style": "path"}),
    )
    other = f"{s3_server.bucket}-other"
    client.create_bucket(Bucket=other)
    assert move(client, taken[0], other, "some/where") > 5
    finish(plain_lab, goods, f"s3://{other}/some/where", options)
