"""Entropy in the keys of state files on S3, encryption by the server, and roles."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import boto3
import pytest

import headgate as hg
from headgate.connectors import generator, parquet_sink, sequence
from headgate.connectors.delta.table import object_store_options
from headgate.connectors.files.locations import s3_client
from headgate.connectors.s3_config import s3_service
from headgate.errors import MissingFileError, OptionError, StorageError, UsageError
from headgate.runtime.options.registry import Options
from headgate.runtime.storage import s3
from headgate.runtime.storage.base import CheckpointStore
from headgate.runtime.storage.open_store import open_store, open_store_at
from headgate.runtime.storage.s3 import Keys

ENTROPY = {"s3.entropy.key": "_entropy_", "s3.entropy.length": "4"}
NAMES = ["log/1.json", "chk/1-2/a.parquet", "chk/1-2/b.bin", "sources/x/y", "probe/z.json"]


@pytest.mark.parametrize(
    ("prefix", "root", "before", "after"),
    [
        ("_entropy_/ck/job", "ck/job/", "", "/ck/job/"),
        ("x/_entropy_/ck/job", "x/ck/job/", "x/", "/ck/job/"),
        ("x/ck-_entropy_/job", "x/ck-/job/", "x/ck-", "/job/"),
        ("x/job/_entropy_", "x/job/", "x/job/", "/"),
    ],
)
def test_only_state_files_of_checkpoints_have_entropy(
    prefix: str, root: str, before: str, after: str
) -> None:
    keys = Keys(prefix, "_entropy_", 4)
    for name in NAMES:
        key = keys.key(name)
        assert keys.name(key) == name
        if name.startswith("chk/"):
            assert key.startswith(before)
            assert key.endswith(f"{after}{name}")
            assert len(key) == len(before) + 4 + len(after) + len(name)
        else:
            assert key == root + name
    spread = {keys.key(f"chk/1-{n}/state.parquet")[: len(before) + 4] for n in range(100)}
    assert len(spread) > 90


def test_keys_of_other_roots_are_not_taken_for_own_ones() -> None:
    keys = Keys("x/_entropy_/job", "_entropy_", 4)
    others = [
        Keys("x/_entropy_/job-2", "_entropy_", 4),
        Keys("x/_entropy_/other", "_entropy_", 4),
        Keys("x/_entropy_/job/job", "_entropy_", 4),
        Keys("x/_entropy_/job", "_entropy_", 5),
    ]
    assert [keys.name(other.key("chk/1-2/a")) for other in others] == [None] * 4
    assert keys.name("x/0000/job/chk/1-2/a") is None  # not the hash of that name
    assert keys.name("y/job/log/1.json") is None


def test_without_the_text_in_the_address_nothing_changes() -> None:
    for keys in (Keys("a/job", "_entropy_", 4), Keys("a/job")):
        assert [keys.key(name) for name in NAMES] == [f"a/job/{name}" for name in NAMES]
        assert keys.listed("chk/") == "a/job/chk/"
    assert Keys("").key("log/1.json") == "log/1.json"


def test_what_is_listed() -> None:
    keys = Keys("x/_entropy_/job", "_entropy_", 4)
    assert keys.listed("log/") == "x/job/log/"
    assert keys.listed("chk/1-") == "x/"
    assert keys.listed("") == "x/"


async def _filled(store: CheckpointStore) -> None:
    await store.open()
    await store.put("log/1.json", b"entry")
    for number in range(5):
        await store.write_file(f"chk/1-{number}/state.bin", b"%d" % number)


@pytest.mark.server
def test_a_store_with_entropy_keeps_to_its_own_objects(s3_server: Any) -> None:
    uri, options = f"{s3_server.uri}/_entropy_/deep", {**s3_server.options, **ENTROPY}
    client = boto3.client("s3", endpoint_url=s3_server.endpoint, region_name="us-east-1")

    async def main() -> None:
        store, other = (open_store(uri, name, options) for name in ("job", "job-2"))
        await _filled(store)
        await _filled(other)
        found = [name async for name, _ in store.list_files("")]
        assert sorted(found) == [*(f"chk/1-{n}/state.bin" for n in range(5)), "log/1.json"]
        assert [size async for _, size in store.list_files("chk/1-3/")] == [1]
        assert await store.read_file("chk/1-3/state.bin") == b"3"
        await store.delete_files(found)
        assert [name async for name, _ in store.list_files("")] == []
        assert len([name async for name, _ in other.list_files("")]) == 6
        above = open_store_at(uri, options)
        await above.open()
        assert await above.list_directories() == ["job-2"]
        uploads = [
            (each._settings.bucket, each._key("chk/9-9/big.bin"))  # type: ignore[attr-defined]
            for each in (store, other)
        ]
        for bucket, key in uploads:
            client.create_multipart_upload(Bucket=bucket, Key=key)
        assert await store.delete_incomplete("") == 1
        assert await other.delete_incomplete("chk/9-9") == 1
        with pytest.raises(MissingFileError, match=r"another s3\.entropy\.key"):
            await store.read_file("chk/1-3/state.bin")
        for each in (store, other, above):
            await each.close()

    asyncio.run(main())


@pytest.mark.server
def test_a_job_resumes_from_checkpoints_with_entropy(s3_server: Any) -> None:
    options = {**s3_server.options, **ENTROPY}
    uri = f"{s3_server.uri}/_entropy_/ck"

    def start() -> hg.JobHandle:
        further = {"s3.sse.type": "sse-s3", "execution.checkpointing.data-inline-threshold": "0 b"}
        made = hg.Job("scattered", options={**options, **further})
        made.checkpoint(every="1h", storage=uri)
        numbers = made.read(generator({"n": sequence()}, rate=1000), name="items")
        sums = numbers.key_by("n").agg(count=hg.count(), name="sums")
        out = f"s3://{s3_server.bucket}/out"
        sums.write(parquet_sink(out, guarantee="exactly_once"), name="out")
        return made.start()

    with start() as handle:
        assert handle.checkpoint() == 1
        handle.cancel()
    client = boto3.client("s3", endpoint_url=s3_server.endpoint, region_name="us-east-1")
    keys = [item["Key"] for item in client.list_objects_v2(Bucket=s3_server.bucket)["Contents"]]
    assert any("/ck/scattered/chk/" in key for key in keys)
    assert "checkpoints/ck/scattered/log/00000000000000000001.json" in keys
    assert any(key.startswith("out/part-") for key in keys)
    for key in keys:
        assert "_entropy_" not in key
        head = client.head_object(Bucket=s3_server.bucket, Key=key)
        assert head["ServerSideEncryption"] == "AES256", key
    with start() as handle:  # resumes, which reads the state files
        assert handle.checkpoint() > 1
        handle.cancel()


@pytest.mark.server
def test_files_are_encrypted_with_the_key_of_a_user(s3_server: Any) -> None:
    options = {
        **s3_server.options,
        "s3.sse.type": "aws:kms",
        "s3.sse.kms.key-id": "alias/headgate",
    }

    async def main() -> None:
        store = open_store(s3_server.uri, "job", options)
        await store.open()
        await store.write_file("chk/1-1/small.bin", b"x")
        await store.write_file("chk/1-1/large.bin", bytes(s3.MULTIPART_THRESHOLD_BYTES + 1))
        await store.close()

    asyncio.run(main())
    client = boto3.client("s3", endpoint_url=s3_server.endpoint, region_name="us-east-1")
    for name in ("small", "large"):
        key = f"checkpoints/job/chk/1-1/{name}.bin"
        head = client.head_object(Bucket=s3_server.bucket, Key=key)
        assert (head["ServerSideEncryption"], head["SSEKMSKeyId"]) == ("aws:kms", "alias/headgate")


@pytest.mark.server
def test_a_role_is_assumed_by_all_clients(s3_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", s3_server.endpoint)
    arn = "arn:aws:iam::123456789012:role/headgate"
    options = {
        **s3_server.options,
        "s3.assume-role.arn": arn,
        "s3.assume-role.external-id": "outside",
        "s3.assume-role.session-name": "job",
    }

    async def main() -> str:
        store = open_store(s3_server.uri, "job", options)
        await store.open()
        await store.put("log/1.json", b"entry")
        assert await store.read("log/1.json") == b"entry"
        credentials = store._client._request_signer._credentials  # type: ignore[attr-defined]
        key: str = (await credentials.get_frozen_credentials()).access_key
        await store.close()
        return key

    assert asyncio.run(main()).startswith("ASIA")  # that of a session
    client = s3_client(options)
    assert client.list_objects_v2(Bucket=s3_server.bucket)["KeyCount"] == 1
    assert client._request_signer._credentials.access_key.startswith("ASIA")
    assert [method for method, _, _ in s3_server.requests()].count("POST") == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"s3.sse.type": "rot13"}, "no such encryption"),
        ({"s3.sse.type": "sse-s3", "s3.sse.kms.key-id": "k"}, "only sse-kms has a key"),
        ({"s3.assume-role.external-id": "x"}, "only a role has an external id"),
        ({"s3.entropy.length": "0"}, "s3.entropy.length"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        s3_service(options)


def test_the_words_of_flink_and_of_s3_are_understood() -> None:
    for word in ("AES256", "sse-s3"):
        assert s3_service({"s3.sse.type": word}).encryption() == {"ServerSideEncryption": "AES256"}
        assert Options({"s3.sse.type": word}).effective()["s3.sse.type"] == "sse-s3"
    service = s3_service({"s3.sse.type": "aws:kms", "s3.sse.kms.key-id": "k"})
    assert service.encryption() == {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": "k"}


def test_a_role_without_credentials_is_an_error_that_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    options = {"s3.assume-role.arn": "arn:aws:iam::1:role/nobody", "s3.region": "us-east-1"}
    with pytest.raises(StorageError, match="NoCredentialsError") as refused:
        asyncio.run(open_store("s3://bucket/x", "job", options).open())
    assert "set AWS_ACCESS_KEY_ID" in str(refused.value)
    with pytest.raises(UsageError, match="no credentials with which to assume a role"):
        s3_client(options)


def test_tables_do_not_ignore_a_role() -> None:
    role = {"s3.assume-role.arn": "arn:aws:iam::1:role/r"}
    with pytest.raises(OptionError, match="Delta tables do not assume roles"):
        object_store_options(role)
    assert object_store_options({**role, "s3.assume-role.arn": ""})
