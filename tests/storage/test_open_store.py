"""From an address to a store."""

from __future__ import annotations

import pytest

from headgate.connectors.files.locations import check_storage_options, s3_client
from headgate.connectors.s3_config import S3Service, compatibility, s3_service
from headgate.errors import OptionError, UsageError
from headgate.operators import extras
from headgate.runtime.options.registry import Options
from headgate.runtime.storage.local import LocalStore
from headgate.runtime.storage.memory import MemoryStore
from headgate.runtime.storage.open_store import open_store


@pytest.mark.parametrize(
    ("uri", "root"),
    [
        ("/data/chk", "/data/chk/flights"),
        ("file:///data/chk", "/data/chk/flights"),
        ("file:///data/with%20space", "/data/with space/flights"),
        ("file://localhost/data", "/data/flights"),
        ("memory://unit-test", "memory://unit-test/flights"),
        ("s3://bucket", "s3://bucket/flights"),
        ("s3://bucket/a/b/", "s3://bucket/a/b/flights"),
        ("s3a://bucket/a?b#c", "s3://bucket/a?b#c/flights"),
    ],
)
def test_addresses(uri, root):
    assert open_store(uri, "flights", {}).describe() == root


def test_a_relative_path_is_taken_from_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = open_store("chk", "flights", {})
    assert isinstance(store, LocalStore)
    assert store.describe() == str(tmp_path / "chk" / "flights")


def test_stores_in_memory_share_objects_by_name_until_forgotten():
    import asyncio

    asyncio.run(open_store("memory://a", "job", {}).put("x", b"1"))
    assert asyncio.run(open_store("memory://a", "job", {}).read("x")) == b"1"
    assert asyncio.run(open_store("memory://b", "job", {}).read("x")) is None
    MemoryStore.forget("a/job")
    assert asyncio.run(open_store("memory://a", "job", {}).read("x")) is None
    MemoryStore.forget("a/job")
    MemoryStore.forget("b/job")


@pytest.mark.parametrize(
    "uri", ["gs://x/y", "", "  ", "file://host/x", "file://", "s3://", "s3:///p"]
)
def test_wrong_addresses_are_refused_with_an_example(uri):
    with pytest.raises(UsageError) as refused:
        open_store(uri, "job", {})
    assert "write " in refused.value.fix


def test_options_of_s3_are_used():
    options = {"s3.endpoint": "http://minio:9000", "s3.path-style-access": "TRUE"}
    store = open_store("s3://bucket/x", "job", options)
    assert store.describe() == "s3://bucket/x/job endpoint=`http://minio:9000`"
    with pytest.raises(OptionError, match=r"s3\.path-style-access"):
        open_store("s3://bucket/x", "job", {"s3.path-style-access": "yes please"})


def test_connections_attempts_and_time_outs_are_options_of_all_that_speaks_to_s3():
    assert s3_service(Options().effective()) == s3_service({})
    texts = {
        "s3.region": "eu-west-1",
        "s3.connection.maximum": "7",
        "s3.connection.establish.timeout": "2 s",
        "s3.connection.timeout": "1500 ms",
        "s3.attempts.maximum": "3",
        "s3.fast.upload.active.blocks": "2",
    }
    options = Options(texts).effective()
    service = s3_service(options)
    assert service == S3Service("", "eu-west-1", False, 7, 2_000, 1_500, 3, 2)
    config = s3_client(options).meta.config
    assert (config.max_pool_connections, config.connect_timeout, config.read_timeout) == (7, 2, 1.5)
    assert config.retries["total_max_attempts"] == 3
    assert check_storage_options(texts) == texts
    with pytest.raises(OptionError, match=r"s3\.connection\.maximum"):
        s3_service({"s3.connection.maximum": "0"})
    with pytest.raises(OptionError, match=r"s3\.attempts\.maximum"):
        s3_service({"s3.attempts.maximum": "many"})
    with pytest.raises(UsageError, match=r"s3\.connection\.timeout"):
        s3_service({"s3.connection.timeout": "10"})
    with pytest.raises(OptionError, match="must not be 0"):
        s3_service({"s3.connection.timeout": "0 s"})


def test_the_endpoint_may_come_from_the_environment_as_for_files(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://minio:9000")
    store = open_store("s3://bucket/x", "job", {})
    assert store.describe() == "s3://bucket/x/job endpoint=`http://minio:9000`"


@pytest.mark.parametrize(
    ("options", "path_style"),
    [
        ({}, False),
        ({"s3.endpoint": "http://minio:9000"}, True),
        ({"s3.endpoint": "http://minio:9000", "s3.path-style-access": "false"}, False),
        ({"s3.path-style-access": "true"}, True),
    ],
)
def test_the_bucket_goes_into_the_path_where_an_endpoint_is_given(options, path_style):
    service = s3_service(options)
    assert service.path_style is path_style
    assert ("s3" in compatibility(service)) is path_style


def test_without_aiobotocore_the_install_line_is_given(monkeypatch):
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "aiobotocore" else name)
    with pytest.raises(UsageError) as refused:
        open_store("s3://bucket/x", "job", {})
    assert "pip install 'headgate[s3]'" in str(refused.value)
    assert isinstance(open_store("/tmp/x", "job", {}), LocalStore)
