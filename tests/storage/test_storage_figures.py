"""Figures of stores about their requests: by operation and outcome, bytes, times, retries."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from typing import Any

import pytest

from headgate.connectors.s3_config import S3Service
from headgate.errors import MissingFileError, StorageError
from headgate.runtime.observe.figures import OPERATIONS, OUTCOMES, StorageFigures
from headgate.runtime.observe.metrics import MetricsRegistry
from headgate.runtime.storage import local
from headgate.runtime.storage.base import CheckpointStore
from headgate.runtime.storage.local import LocalStore
from headgate.runtime.storage.open_store import counted, open_store_at
from headgate.runtime.storage.s3 import S3Settings, S3Store


async def use(store: CheckpointStore, path: Path) -> None:
    """Each kind of request, on a store that is open; twelve bytes go there, seventeen come back."""
    store.figures = StorageFigures()
    await store.put("hint", b"12")
    await store.create_if_absent("log/1", b"345")
    await store.create_if_absent("log/1", b"345 is there")
    await store.write_file("files/a", b"6789012")
    await store.read_file("files/a")
    await store.read_range("files/a", 1, 3)
    await store.download("files/a", path)
    with pytest.raises(MissingFileError):
        await store.download("files/b", path)
    assert await store.read("nothing") is None
    assert [name async for name, _ in store.list_files("files/")] == ["files/a"]
    await store.delete("hint")
    await store.delete_files(["files/a"])


def check(figures: StorageFigures, read_bytes: int) -> None:
    assert figures.requests == {
        ("write", "ok"): 2,
        ("create", "ok"): 2,
        ("read", "ok"): 5,
        ("list", "ok"): 1,
        ("delete", "ok"): 2,
    }
    assert figures.retries.total() == 0
    assert figures.written_bytes == 12
    assert figures.read_bytes == read_bytes
    for operation in OPERATIONS:
        timed = sum(figures.seconds[operation].counts)
        assert timed == sum(figures.requests[operation, outcome] for outcome in OUTCOMES)


def test_a_directory_counts_its_requests(tmp_path: Path) -> None:
    async def main() -> None:
        store = LocalStore(tmp_path / "root")
        await store.open()
        await use(store, tmp_path / "copy")
        check(store.figures, 17)
        await store.close()

    asyncio.run(main())


@pytest.mark.server
def test_s3_counts_its_requests(s3_server: Any, tmp_path: Path) -> None:
    async def main() -> None:
        store = open_store_at(s3_server.uri + "/counted", s3_server.options)
        await store.open()
        await use(store, tmp_path / "copy")
        check(store.figures, 17 + len(b"345"))  # what was there already is read for the answer
        await store.close()

    asyncio.run(main())


def test_a_request_that_fails_is_counted_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    async def main() -> None:
        store = LocalStore(tmp_path / "root")
        await store.open()
        store.figures = StorageFigures()
        monkeypatch.setattr(local.os, "replace", full)
        with pytest.raises(StorageError, match="no space left"):
            await store.put("hint", b"12")
        assert store.figures.requests == {("write", "failed"): 1}
        assert store.figures.written_bytes == 0
        await store.close()

    asyncio.run(main())


@pytest.mark.server
def test_tries_that_are_throttled_or_fail_are_told_apart(s3_server: Any) -> None:
    async def no_pause(_: float) -> None:
        return None

    async def main() -> None:
        settings = S3Settings(
            s3_server.bucket, "told-apart", S3Service(s3_server.endpoint, "us-east-1", True)
        )
        store = S3Store(settings, sleep=no_pause)
        await store.open()
        store.figures = StorageFigures()
        fault = {"method": "PUT", "contains": "hint", "when": "before"}
        s3_server.inject({**fault, "status": 429}, {**fault, "status": 500})
        await store.put("hint", b"12")
        assert store.figures.requests == {
            ("write", "throttled"): 1,
            ("write", "failed"): 1,
            ("write", "ok"): 1,
        }
        assert store.figures.retries == {"write": 2}
        assert store.figures.written_bytes == 2
        await store.close()

    asyncio.run(main())


def test_stores_of_one_process_count_together(tmp_path: Path) -> None:
    async def main() -> None:
        figures = StorageFigures()
        opener = counted(open_store_at, figures)
        for name in ("a", "b"):
            store = opener(str(tmp_path / name), {})
            await store.open()
            await store.close()
        registry = MetricsRegistry()
        figures.register(registry.group(job_name="j").add())
        samples = [sample for family in registry.collect() for sample in family.samples]
        shown = {
            (sample.labels["operation"], sample.labels["outcome"]): sample.value
            for sample in samples
            if sample.name == "headgate_storage_requests_total"
        }
        assert shown.keys() == {(made, ended) for made in OPERATIONS for ended in OUTCOMES}
        assert shown["create", "ok"] == figures.requests["create", "ok"] > 2
        assert not [each for each in shown if each[1] != "ok" and shown[each]]

    asyncio.run(main())
