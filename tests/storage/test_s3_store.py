"""The S3 store against a real server process that fails on request."""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest
from botocore.loaders import JSONFileLoader

from headgate.connectors.s3_config import S3Service
from headgate.errors import StorageError
from headgate.runtime.storage import s3
from headgate.runtime.storage.base import Created, Existed
from headgate.runtime.storage.open_store import open_store
from headgate.runtime.storage.retry import RetryPolicy
from headgate.runtime.storage.s3 import S3Settings, S3Store

pytestmark = pytest.mark.server

AWS = S3Service("", "", False)


def settings_of(server):
    return S3Settings(server.bucket, "root/job", S3Service(server.endpoint, "us-east-1", True))


@contextlib.asynccontextmanager
async def opened(server, sleeps=None, attempts_max=4):
    async def sleep(seconds):
        if sleeps is not None:
            sleeps.append(seconds)

    store = S3Store(
        settings_of(server),
        policy=RetryPolicy(attempts_max=attempts_max),
        sleep=sleep,
        rng=random.Random(5),
    )
    await store.open()
    try:
        yield store
    finally:
        await store.close()


def fault(method, contains, when="before", status=503):
    return {"method": method, "contains": contains, "when": when, "status": status}


def test_clients_share_the_descriptions_of_the_services(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    nowhere = S3Settings("bucket", "", S3Service("http://127.0.0.1:1", "us-east-1", True))

    async def connect():
        async with s3.aiobotocore_client(nowhere) as client:
            return client.meta.service_model.service_name

    assert asyncio.run(connect()) == "s3"
    read = []
    load = JSONFileLoader.load_file
    monkeypatch.setattr(
        JSONFileLoader, "load_file", lambda self, path: [read.append(path), load(self, path)][1]
    )
    assert asyncio.run(connect()) == "s3"
    assert read == []


def test_a_store_that_ignores_the_condition_is_refused(s3_unconditional_server):
    async def main():
        store = open_store(s3_unconditional_server.uri, "job", s3_unconditional_server.options)
        with pytest.raises(StorageError) as refused:
            await store.open()
        text = str(refused.value)
        assert "it ignored the condition and overwrote an object" in text
        assert f"s3://{s3_unconditional_server.bucket}/checkpoints/job" in text
        assert "If-None-Match" in text

    asyncio.run(main())
    requests = s3_unconditional_server.requests()
    assert [method for method, path, _ in requests if "/probe/" in path][-1] == "DELETE"


def test_a_missing_bucket_is_named(s3_server):
    async def main():
        await open_store("s3://no-such-bucket-here/x", "job", s3_server.options).open()

    with pytest.raises(StorageError, match="NoSuchBucket") as refused:
        asyncio.run(main())
    assert "create the bucket first" in str(refused.value)


def test_a_server_that_is_not_there_is_reported_after_bounded_retries(s3_server):
    sleeps = []

    async def main():
        async def sleep(seconds):
            sleeps.append(seconds)

        settings = S3Settings(
            s3_server.bucket,
            "x",
            S3Service("http://127.0.0.1:9", "us-east-1", True, attempts_max=3),
        )
        await S3Store(settings, sleep=sleep).open()

    with pytest.raises(StorageError, match="did not answer"):
        asyncio.run(main())
    # Two calls were tried thrice: the probe's first create, and the delete that cleans up behind it.
    assert len(sleeps) == 4


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("status", [503, 500, 0])
@pytest.mark.parametrize("failures", [1, 3])
def test_a_create_whose_answer_is_lost_is_still_created_once(s3_server, when, status, failures):
    """`after`: the server stored the object, the client saw an error or a closed connection."""

    async def main():
        async with opened(s3_server) as store:
            s3_server.inject(*[fault("PUT", "log/1", when, status)] * failures)
            assert await store.create_if_absent("log/1.json", b"mine") == Created()
            assert s3_server.faults_left() == []
            assert await store.read("log/1.json") == b"mine"
            assert await store.create_if_absent("log/1.json", b"other") == Existed(b"mine")

    asyncio.run(main())


def test_a_create_that_failed_before_its_effect_and_then_lost_the_race_existed(s3_server):
    async def main():
        async with opened(s3_server) as rival:
            sleeping, stored = asyncio.Event(), asyncio.Event()

            async def sleep(seconds):
                sleeping.set()
                await stored.wait()

            store = S3Store(settings_of(s3_server), sleep=sleep)
            await store.open()
            s3_server.inject(fault("PUT", "log/1"))
            create = asyncio.ensure_future(store.create_if_absent("log/1.json", b"mine"))
            await sleeping.wait()
            assert await rival.create_if_absent("log/1.json", b"rival") == Created()
            stored.set()
            assert await create == Existed(b"rival")
            await store.close()

    asyncio.run(main())


def test_every_call_survives_transient_errors(s3_server):
    async def main():
        sleeps = []
        async with opened(s3_server, sleeps) as store:
            for method, call in [
                ("PUT", lambda: store.put("a", b"1")),
                ("GET", lambda: store.read("a")),
                ("PUT", lambda: store.write_file("f", b"2")),
                ("GET", lambda: store.read_file("f")),
                ("DELETE", lambda: store.delete("a")),
                ("POST", lambda: store.delete_files(["f"])),
            ]:
                for when, status in [("before", 503), ("after", 500), ("before", 0)]:
                    s3_server.inject(fault(method, s3_server.bucket, when, status))
                    before = len(sleeps)
                    await call()
                    # A closed connection is also tried again inside the HTTP client, without a pause.
                    assert len(sleeps) - before in ([1] if status else [0, 1])
                    assert s3_server.faults_left() == []

    asyncio.run(main())


def test_errors_that_last_are_raised_after_the_last_attempt(s3_server):
    async def main():
        sleeps = []
        async with opened(s3_server, sleeps, attempts_max=3) as store:
            s3_server.inject(*[fault("PUT", "log/1")] * 3)
            with pytest.raises(StorageError, match=r"cannot create .* name=`log/1.json`"):
                await store.create_if_absent("log/1.json", b"x")
            assert len(sleeps) == 2
            assert await store.read("log/1.json") is None

    asyncio.run(main())


def uploads_and_objects(server):
    import boto3

    client = boto3.client("s3", endpoint_url=server.endpoint, region_name="us-east-1")
    uploads = client.list_multipart_uploads(Bucket=server.bucket).get("Uploads", [])
    objects = client.list_objects_v2(Bucket=server.bucket).get("Contents", [])
    client.close()
    return [upload["Key"] for upload in uploads], [item["Key"] for item in objects]


BIG = bytes(range(256)) * ((17 << 20) // 256) + b"tail"


@pytest.mark.parametrize(
    "faults",
    [
        [fault("POST", "uploads")],
        [fault("PUT", "partNumber=2", "before", 0), fault("PUT", "partNumber=3", "after", 500)],
        [fault("POST", "uploadId", "before")],
        [fault("POST", "uploadId", "after")],
        [fault("POST", "uploadId", "after", 0)],
    ],
)
def test_a_large_file_survives_transient_errors_in_every_step(s3_server, faults):
    async def main():
        async with opened(s3_server) as store:
            s3_server.inject(*faults)
            await store.write_file("chk/big.parquet", memoryview(BIG))
            assert s3_server.faults_left() == []
            assert await store.read_file("chk/big.parquet") == BIG

    asyncio.run(main())
    parts = [query for method, _, query in s3_server.requests() if "partNumber=" in query]
    assert {part.split("partNumber=")[1].split("&")[0] for part in parts} == {"1", "2", "3"}


def test_a_failing_upload_is_aborted_and_nothing_is_visible(s3_server):
    async def main():
        async with opened(s3_server, attempts_max=2) as store:
            s3_server.inject(*[fault("PUT", "partNumber=2")] * 2)
            with pytest.raises(StorageError, match=r"big\.parquet"):
                await store.write_file("chk/big.parquet", BIG)
            assert await store.read("chk/big.parquet") is None

    asyncio.run(main())
    assert uploads_and_objects(s3_server) == ([], [])


def test_a_cancelled_upload_is_aborted_and_nothing_is_visible(s3_server):
    async def main():
        retrying = asyncio.Event()

        async def sleep(seconds):
            retrying.set()
            await asyncio.Event().wait()

        store = S3Store(settings_of(s3_server), sleep=sleep)
        await store.open()
        s3_server.inject(fault("PUT", "partNumber=3"))
        writer = asyncio.ensure_future(store.write_file("chk/big.parquet", BIG))
        await retrying.wait()
        assert len(uploads_and_objects(s3_server)[0]) == 1, "the upload has begun"
        writer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writer
        await store.close()

    asyncio.run(main())
    assert uploads_and_objects(s3_server) == ([], [])


def test_a_part_is_never_below_what_ten_thousand_parts_allow(monkeypatch, s3_server):
    """With a limit of 2 parts, 17 MiB go up in two parts instead of three of at most 8."""
    monkeypatch.setattr(s3, "MULTIPART_PARTS_MAX", 2)

    async def main():
        async with opened(s3_server) as store:
            s3_server.inject()
            await store.write_file("big", BIG)
            assert await store.read_file("big") == BIG

    asyncio.run(main())
    assert sum("partNumber=" in query for _, _, query in s3_server.requests()) == 2


class FakeClient:
    """A client whose PutObject answers are scripted, for answers a real server gives rarely."""

    def __init__(self, *answers):
        self.answers, self.objects = list(answers), {}

    async def __aenter__(self):
        return self

    async def __aexit__(self, *error):
        pass

    async def put_object(self, *, Bucket, Key, Body, IfNoneMatch=None):
        answer = self.answers.pop(0) if self.answers and "probe" not in Key else None
        if answer is not None:
            raise client_error(*answer)
        if IfNoneMatch and Key in self.objects:
            raise client_error("PreconditionFailed", 412)
        self.objects[Key] = Body

    async def get_object(self, *, Bucket, Key):
        if Key not in self.objects:
            raise client_error("NoSuchKey", 404)
        return {"Body": FakeBody(self.objects[Key])}

    async def delete_object(self, *, Bucket, Key):
        self.objects.pop(Key, None)


class FakeBody:
    def __init__(self, data):
        self.data = data

    async def __aenter__(self):
        return self

    async def __aexit__(self, *error):
        pass

    async def read(self):
        return self.data


def client_error(code, status):
    from botocore.exceptions import ClientError

    details = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(details, "PutObject")


@pytest.mark.parametrize(
    ("answers", "attempts"),
    [
        ([("ConditionalRequestConflict", 409)], 2),
        ([("SlowDown", 503), ("ConditionalRequestConflict", 409)], 3),
        # Refused because of an object that is gone when we look: a rival was deleted meanwhile.
        ([("PreconditionFailed", 412)], 2),
    ],
)
def test_conflicts_are_tried_again(answers, attempts):
    sleeps = []

    async def sleep(seconds):
        sleeps.append(seconds)

    async def main():
        store = S3Store(
            S3Settings("bucket", "", AWS), sleep=sleep, connect=lambda _: FakeClient(*answers)
        )
        await store.open()
        assert await store.create_if_absent("log/1.json", b"mine") == Created()
        await store.close()

    asyncio.run(main())
    assert len(sleeps) == attempts - 1


def test_refusals_are_not_tried_again_and_say_what_to_allow():
    async def main():
        client = FakeClient(("AccessDenied", 403))
        store = S3Store(S3Settings("bucket", "", AWS), connect=lambda _: client)
        await store.open()
        with pytest.raises(StorageError, match="AccessDenied") as refused:
            await store.create_if_absent("log/1.json", b"mine")
        assert "s3:PutObject" in str(refused.value)
        await store.close()

    asyncio.run(main())


def test_listings_go_on_behind_their_first_page(s3_server):
    async def main():
        async with opened(s3_server) as store:
            names = [f"chk/1-1/{n:04}" for n in range(1005)]
            for first in range(0, len(names), 50):
                await asyncio.gather(*(store.put(n, b"x") for n in names[first : first + 50]))
            listed = [name async for name, _ in store.list_files("chk/")]
            assert sorted(listed) == names

    asyncio.run(main())


def test_uploads_that_dead_writers_left_are_removed(s3_server):
    import boto3

    async def main():
        async with opened(s3_server) as store:
            client = boto3.client("s3", endpoint_url=s3_server.endpoint, region_name="us-east-1")
            for key in ("root/job/chk/1-1/a", "root/job/chk/1-1/b", "root/job2/chk/1-1/c"):
                client.create_multipart_upload(Bucket=s3_server.bucket, Key=key)
            client.close()
            assert await store.delete_incomplete("chk") == 2

    asyncio.run(main())
    assert uploads_and_objects(s3_server)[0] == ["root/job2/chk/1-1/c"]


def test_a_download_goes_on_where_it_broke_off(s3_server, tmp_path, monkeypatch):
    """A body that ends in the middle: the next request asks for the rest only."""

    async def main():
        async with opened(s3_server) as store:
            await store.write_file("chk/big", BIG)
            broken = []
            rest = store._download_rest

            async def breaks_once(name, file):
                if not broken:
                    broken.append(file.write(BIG[: 5 << 20]))
                    raise ConnectionResetError("in the middle")
                await rest(name, file)

            monkeypatch.setattr(store, "_download_rest", breaks_once)
            await store.download("chk/big", tmp_path / "big")
            assert broken == [5 << 20]
            assert (tmp_path / "big").read_bytes() == BIG

    asyncio.run(main())


def test_a_failed_upload_is_given_up_in_bounded_time(s3_server, monkeypatch):
    """A store that does not answer aborts either: cancelling must not take the whole retry budget."""
    monkeypatch.setattr(s3, "CLEAN_UP_S", 0.05)
    retrying, forever = asyncio.Event(), asyncio.Event()

    async def sleep(seconds):
        retrying.set()
        await forever.wait()

    async def main():
        store = S3Store(settings_of(s3_server), sleep=sleep)
        await store.open()
        s3_server.inject(fault("PUT", "partNumber=3"), *[fault("DELETE", "uploadId")] * 9)
        writer = asyncio.ensure_future(store.write_file("chk/big.parquet", BIG))
        await retrying.wait()
        writer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(writer, 60)
        await store.close()

    asyncio.run(main())
