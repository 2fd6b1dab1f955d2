"""Checksums of uploads to S3: what the store is told, and what becomes of a part that it damages."""

from __future__ import annotations

import logging
import zlib
from base64 import b64decode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError, FlexibleChecksumError

from headgate.connectors.files import s3_drafts
from headgate.connectors.files.drafts import Committable
from headgate.connectors.files.locations import parse_location, s3_client
from headgate.connectors.files.s3_drafts import S3Target
from headgate.errors import CorruptError
from headgate.testing.servers import versitygw
from headgate.testing.servers.process import START_S_MAX

PARTS = (b"a" * 100, b"b" * 50)
LARGE = (b"a" * (5 << 20), b"b" * 50)
"""A real server takes no smaller part but the last."""
WHOLE = {"ChecksumAlgorithm": "CRC32", "ChecksumType": "FULL_OBJECT"}


class Store:
    """An S3 client whose store knows checksums as `answer` says."""

    def __init__(self, answer: dict[str, str], refuses: int = 0) -> None:
        self.answer, self.refuses = answer, refuses
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Callable[..., dict[str, str]]:
        def call(**given: Any) -> dict[str, str]:
            self.calls.append((name, given))
            if name == "create_multipart_upload" and "ChecksumType" in given and self.refuses:
                details = {"ResponseMetadata": {"HTTPStatusCode": self.refuses}}
                raise ClientError(details, "CreateMultipartUpload")
            return {"UploadId": "upload", "ETag": "etag", **self.answer}

        return call

    def named(self, name: str) -> list[dict[str, Any]]:
        return [given for called, given in self.calls if called == name]


def written(
    target: S3Target, monkeypatch: pytest.MonkeyPatch, parts: tuple[bytes, bytes] = PARTS
) -> Committable:
    """A file of two parts, ready for its commit."""
    monkeypatch.setattr(s3_drafts, "PART_BYTES", len(parts[0]))
    draft = target.begin("file")
    draft.stream.write(b"".join(parts))
    return draft.finish()


def target_of(bucket: str, options: dict[str, str]) -> S3Target:
    return S3Target(parse_location(f"s3://{bucket}/out"), "job", "sink", options, lambda call: None)


def crc(text: str) -> int:
    return int.from_bytes(b64decode(text), "big")


@pytest.mark.parametrize(
    ("answer", "parts", "whole"),
    [(WHOLE, True, True), ({"ChecksumAlgorithm": "CRC32"}, True, False), ({}, False, False)],
    ids=["whole", "parts", "none"],
)
def test_a_store_is_told_the_checksums_that_it_knows(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    answer: dict[str, str],
    parts: bool,
    whole: bool,
) -> None:
    store = Store(answer)
    monkeypatch.setattr(s3_drafts, "s3_client", lambda options: store)
    target = target_of(f"bucket-{len(answer)}", {})  # each store is reported once
    with caplog.at_level(logging.INFO):
        target.commit([written(target, monkeypatch)])
    assert ("no checksum of a whole upload" in caplog.text) is not whole
    (completed,) = store.named("complete_multipart_upload")
    for part, given, named in zip(
        PARTS, store.named("upload_part"), completed["MultipartUpload"]["Parts"], strict=True
    ):
        sent = given.get("ChecksumCRC32")
        assert (sent and crc(sent)) == (zlib.crc32(part) if parts else None)
        assert named.get("ChecksumCRC32") == sent
    sent = completed.get("ChecksumCRC32")
    assert (sent and crc(sent)) == (zlib.crc32(b"".join(PARTS)) if whole else None)
    assert completed.get("ChecksumType") == ("FULL_OBJECT" if whole else None)


@pytest.mark.parametrize("status", [400, 501])
def test_a_store_that_refuses_checksums_is_asked_without(
    monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    store = Store({}, refuses=status)
    monkeypatch.setattr(s3_drafts, "s3_client", lambda options: store)
    target = target_of("bucket", {})
    target.commit([written(target, monkeypatch)])
    assert len(store.named("create_multipart_upload")) == 2
    assert "ChecksumCRC32" not in store.named("upload_part")[0]


def damage(objects: Path) -> None:
    """Flip a bit of the second part of the upload that lies in the directory of the server."""
    (part,) = [
        path
        for path in objects.rglob("2")
        if path.is_file() and path.stat().st_size == len(LARGE[1])
    ]
    data = bytearray(part.read_bytes())
    data[7] ^= 1
    part.write_bytes(data)


@pytest.mark.server
@pytest.mark.timeout(versitygw.BUILD_S_MAX + START_S_MAX)
def test_who_reads_an_object_sees_that_the_store_damaged_a_part_before_its_commit(
    gateway: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, client = target_of(versitygw.BUCKET, gateway), s3_client(gateway)

    def read() -> bytes:
        found = client.get_object(Bucket=versitygw.BUCKET, Key="out/file", ChecksumMode="ENABLED")
        data: bytes = found["Body"].read()
        return data

    target.commit([written(target, monkeypatch, LARGE)])
    assert read() == b"".join(LARGE)
    client.delete_object(Bucket=versitygw.BUCKET, Key="out/file")
    committable = written(target, monkeypatch, LARGE)
    damage(tmp_path / "objects")
    target.commit([committable])
    with pytest.raises(FlexibleChecksumError):
        read()


@pytest.mark.server
@pytest.mark.timeout(versitygw.BUILD_S_MAX + START_S_MAX)
def test_a_store_that_finds_another_checksum_at_the_commit_is_told_to_the_user(
    gateway: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = target_of(versitygw.BUCKET, {**gateway, "s3.attempts.maximum": "1"})
    committable = written(target, monkeypatch, LARGE)
    fields = {name: getattr(committable, name) for name in committable.__struct_fields__}
    with pytest.raises(CorruptError, match="damaged a file that was to be committed"):
        target.commit([Committable(**{**fields, "whole_sum": "AAAAAA=="})])
    target.commit([committable])


def test_ten_thousand_parts_hold_the_largest_object_of_s3() -> None:
    sizes = [s3_drafts.part_bytes(parts) for parts in range(10_000)]
    assert sum(sizes) >= 5 << 40
    assert max(sizes) <= 5 << 30
    assert set(sizes[: s3_drafts.EQUAL_PARTS]) == {s3_drafts.PART_BYTES}
