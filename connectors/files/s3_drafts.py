"""Drafts on S3: multipart uploads, made visible by completing them (see `drafts.py`).

Parts are uploaded while the file is written, each with its MD5, which the server compares, so the server
keeps the bytes that were sent. From then on the store guards them: a part cannot be read before the
upload is complete. A store that supports checksums of uploads, as its answers show, also gets the CRC-32
of each part and of the whole file. It compares them when the upload is completed, and keeps the latter
with the object, so that readers of the object can compare it with the bytes.

The object itself shows that an upload has been completed already: it carries the mark of the sink that
wrote it.
"""

from __future__ import annotations

import asyncio
import io
import logging
import os
import threading
import zlib
from base64 import b64encode
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from hashlib import md5
from typing import Any, Final

import msgspec
import pyarrow as pa
from xxhash import xxh3_64

from ...errors import CorruptError, JobError, StorageError, TargetAwayError, UsageError, check
from ...operators.sink import DROPPED_FIX, OutputFile
from ..s3_config import s3_service
from .drafts import Committable, Draft, failed, merged_by_restored, quoted
from .locations import Location, s3_client

PART_BYTES: Final = 8 << 20
EQUAL_PARTS: Final = 5_000
"""The number of parts of a file with `PART_BYTES` each. Later parts are larger, as S3 takes 10,000.

Some stores refuse parts of different sizes, which is why files of up to 40 GiB have none.
"""
_DELETED_AT_ONCE = 1_000
"""The number of objects in one request to list or delete, which is the most that S3 takes."""
_CHECKSUM: Final = "CRC32"
_WHOLE: Final = "FULL_OBJECT"
"""The type of checksum that covers the bytes of the whole object, not the checksums of its parts."""
_MARK = "headgate"
"""The key of the object metadata by which our own objects are recognised."""
_ABSENT: Final = ("404", "NoSuchKey", "NotFound")
_log = logging.getLogger("headgate.connectors")


class S3Target:
    """A prefix in a bucket."""

    def __init__(
        self,
        location: Location,
        job: str,
        sink: str,
        options: dict[str, str],
        run_in_thread: Callable[[Callable[[], Any]], Any],
    ) -> None:
        self._location = location
        self._mark = f"{quoted(job)}/{quoted(sink)}"
        self._hidden = f"{self._prefix}.headgate/{self._mark}/"
        self._options = options
        self._run_in_thread = run_in_thread
        self._begun: set[str] = set()
        """The marks of drafts that were begun here and are not yet committed."""

    @property
    def _prefix(self) -> str:
        return f"{self._location.key}/" if self._location.key else ""

    def prepare(self) -> None:
        try:
            self._client.head_bucket(Bucket=self._location.bucket)
        except _errors() as error:
            raise _no_bucket(self._location, error) from error

    def begin(self, name: str) -> Draft:
        return self._draft(
            self._location.bucket, self._prefix + name, f"{self._mark}/{name}", self._hidden + name
        )

    def _draft(self, bucket: str, key: str, mark: str, hidden: str) -> Draft:
        self._begun.add(mark)
        service = s3_service(self._options)
        return _S3Draft(
            self._client,
            bucket,
            key,
            mark,
            hidden,
            service.encryption(),
            self._run_in_thread,
            service.upload_parts_max,
        )

    def begin_merged(self, name: str, held: Committable, place: str) -> Draft:
        bucket, _, key = place.partition("/")
        _, _, first = held.target.partition("/")
        # The restored checkpoint has the group, and so no upload of the merged file: what is there was
        # begun for a checkpoint that was not completed.
        for page in self._uploads(bucket, first.rpartition(".")[0]):
            for upload in page.get("Uploads", ()):
                if upload["Key"] in (key, first):
                    _abort(self._client, bucket, upload["Key"], upload["UploadId"])
        return self._draft(bucket, key, held.mark, "")

    def content(self, held: Committable) -> pa.Buffer | None:
        bucket, _, key = held.draft.partition("/")
        try:
            return pa.py_buffer(self._client.get_object(Bucket=bucket, Key=key)["Body"].read())
        except _errors() as error:
            if _code(error) in _ABSENT:
                return None
            raise failed("read", f"s3://{held.draft}", error) from error

    def is_visible(self, held: Committable, last: Committable) -> bool:
        if _found(self._client, held) is not None:
            return True
        bucket, _, key = held.target.partition("/")
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=bucket, Prefix=f"{key.rpartition('.')[0]}-"
        )
        places = (
            f"{bucket}/{item['Key']}"
            for page in _listed(pages, self._location)
            for item in page.get("Contents", ())
        )
        return any(
            _found(self._client, msgspec.structs.replace(held, target=place)) is not None
            for place in places
            if merged_by_restored(place, held.target, last.draft)
        )

    def drop(self, drafts: Sequence[str]) -> None:
        for draft in drafts:
            bucket, _, key = draft.partition("/")
            _delete_object(self._client, bucket, key)
            self._begun.discard(f"{self._mark}/{key.removeprefix(self._hidden)}")

    def names(self, prefix: str) -> Iterator[str]:
        for file in self.visible(prefix):
            yield file.name
        for name, _ in self.drafts(prefix):
            yield name

    def visible(self, prefix: str) -> Iterator[OutputFile]:
        for page in self._pages(prefix):
            yield from page

    def delete(self, files: list[OutputFile]) -> int:
        wanted = {file.name: file.version for file in files}
        deleted = 0
        # This deletes a page of the listing at a time, so that little time passes between the check and
        # the deletion.
        prefix = os.path.commonprefix(list(wanted))  # noqa: RUF071  (of names, not of paths)
        for page in self._pages(prefix) if wanted else ():
            names = [file.name for file in page if wanted.get(file.name) == file.version]
            if names:
                self._delete(names)
                deleted += len(names)
        return deleted

    def _pages(self, prefix: str) -> Iterator[list[OutputFile]]:
        """Yield the visible objects here, at most `_DELETED_AT_ONCE` at a time."""
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._location.bucket,
            Prefix=self._prefix + prefix,
            Delimiter="/",
            PaginationConfig={"PageSize": _DELETED_AT_ONCE},
        )
        for page in _listed(pages, self._location):
            yield [
                OutputFile(
                    item["Key"].removeprefix(self._prefix),
                    f"{item['ETag']}@{item['LastModified'].isoformat()}",
                )
                for item in page.get("Contents", ())
            ]

    def _delete(self, names: list[str]) -> None:
        keys = [{"Key": self._prefix + name} for name in names]
        try:
            answer = self._client.delete_objects(
                Bucket=self._location.bucket, Delete={"Objects": keys, "Quiet": True}
            )
        except _errors() as error:
            raise failed("deleted", self._location, error) from error
        for refused in answer.get("Errors", ()):
            path = f"s3://{self._location.bucket}/{refused.get('Key')}"
            raise failed("deleted", path, StorageError(str(refused.get("Message"))))

    def drafts(self, prefix: str) -> Iterator[tuple[str, Callable[[], None]]]:
        bucket, client = self._location.bucket, self._client
        for page in self._uploads(bucket, self._prefix + prefix):
            for upload in page.get("Uploads", ()):
                key, upload_id = upload["Key"], upload["UploadId"]

                def abort(key: str = key, upload_id: str = upload_id) -> None:
                    _abort(client, bucket, key, upload_id)

                yield key.removeprefix(self._prefix), abort
        held = client.get_paginator("list_objects_v2").paginate(
            Bucket=bucket, Prefix=self._hidden + prefix
        )
        for page in _listed(held, self._location):
            for item in page.get("Contents", ()):
                delete = partial(_delete_object, client, bucket, item["Key"])
                yield item["Key"].removeprefix(self._hidden), delete

    def _uploads(self, bucket: str, prefix: str) -> Iterator[Any]:
        """Yield pages of the multipart uploads to keys with a prefix."""
        pages = self._client.get_paginator("list_multipart_uploads").paginate(
            Bucket=bucket, Prefix=prefix
        )
        return _listed(pages, self._location)

    def commit(self, committables: list[Committable]) -> None:
        for committable in committables:
            # After a restore, drafts that others began are most likely committed already.
            if committable.mark in self._begun or not _is_there(self._client, committable):
                _complete(self._client, committable)
            self._begun.discard(committable.mark)

    @property
    def _client(self) -> Any:
        return s3_client(self._options)


class _S3Draft:
    """A multipart upload whose parts are uploaded in threads while it is written."""

    def __init__(
        self,
        client: Any,
        bucket: str,
        key: str,
        mark: str,
        hidden: str,
        encryption: dict[str, str],
        run_in_thread: Callable[[Callable[[], Any]], Any],
        waiting_max: int,
    ) -> None:
        self._client, self._bucket, self._key, self._mark = client, bucket, key, mark
        self._encryption = encryption
        self._hidden = hidden
        """The key under which the file is held, if it is."""
        self._run_in_thread = run_in_thread
        self._waiting_max = waiting_max
        self.stream = _PartStream(self._add_part)
        self._upload_id = ""
        self._starting = threading.Lock()
        self._changed = threading.Condition()
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._uploading = 0
        self._etags: dict[int, str] = {}
        self._sums: dict[int, str] = {}
        self._parts = 0
        self._whole_sum = 0
        self._sums_parts = False
        self._sums_whole = False
        self._closed = False

    def finish(self) -> Committable:
        if not self._closed:
            self._closed = True
            self.stream.end()
        self.flush()
        return Committable(
            f"{self._bucket}/{self._key}",
            self.stream.tell(),
            upload_id=self._upload_id,
            parts=tuple(self._etags[number] for number in range(1, self._parts + 1)),
            mark=self._mark,
            part_sums=tuple(self._sums[number] for number in sorted(self._sums)),
            whole_sum=_base64(self._whole_sum) if self._sums_whole else "",
        )

    def hold(self) -> Committable | None:
        """Write the file as an object. One that has parts is too large: they cannot be read back."""
        if self._parts:
            return None
        data = self.stream.waiting()
        draft = f"{self._bucket}/{self._hidden}"
        try:
            self._client.put_object(
                Bucket=self._bucket,
                Key=self._hidden,
                Body=data,
                ContentMD5=b64encode(md5(data, usedforsecurity=False).digest()).decode(),
                **self._encryption,
            )
        except _errors() as error:
            raise failed("held", f"s3://{draft}", error) from error
        return Committable(
            f"{self._bucket}/{self._key}",
            len(data),
            draft=draft,
            mark=self._mark,
            checksum=xxh3_64(data).hexdigest(),
            held=True,
        )

    def flush(self) -> None:
        try:
            # Upload all waiting parts here: the threads meant for it may be busy, or be this one.
            while not self._all_uploaded():
                self._upload_one()
        except _errors() as error:
            raise failed("uploaded", f"s3://{self._bucket}/{self._key}", error) from error

    def discard(self) -> None:
        self.stream.mute()
        # This runs in a thread, as S3 may not answer. The next attempt aborts uploads that it leaves
        # behind.
        with suppress(RuntimeError):
            self._run_in_thread(self._abort).add_done_callback(_look_at)

    def _abort(self) -> None:
        with self._changed:
            self._waiting.clear()
            self._changed.wait_for(lambda: self._uploading == 0)
        if self._upload_id:
            _abort(self._client, self._bucket, self._key, self._upload_id)

    def _add_part(self, data: bytes) -> None:
        with self._changed:
            self._parts += 1
            self._whole_sum = zlib.crc32(data, self._whole_sum)
            self._waiting.append((self._parts, data))
            crowded = len(self._waiting) > self._waiting_max
        if self._closed or not _in_event_loop():
            # A closing encoder writes in an I/O thread; `finish`, which follows there, uploads all
            # waiting parts.
            return
        if crowded:
            # The network is slower than the stream. Holding up the subtask is the backpressure.
            self._upload_one()
        else:
            self._run_in_thread(self._upload_one).add_done_callback(_look_at)

    def _all_uploaded(self) -> bool:
        """Return True if all parts are uploaded. Waits while others still upload and no part is waiting."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._waiting) or self._uploading == 0)
            return not self._waiting

    def _upload_one(self) -> None:
        """Upload one waiting part if there is one. A part whose upload failed waits again."""
        with self._changed:
            if not self._waiting:
                return
            number, data = self._waiting.popleft()
            self._uploading += 1
        try:
            self._start()
            checksum = _base64(zlib.crc32(data)) if self._sums_parts else ""
            answer = self._client.upload_part(
                Bucket=self._bucket,
                Key=self._key,
                UploadId=self._upload_id,
                PartNumber=number,
                Body=data,
                ContentMD5=b64encode(md5(data, usedforsecurity=False).digest()).decode(),
                **({f"Checksum{_CHECKSUM}": checksum} if checksum else {}),
            )
            self._etags[number] = answer["ETag"]
            if checksum:
                self._sums[number] = checksum
        except BaseException:
            with self._changed:
                self._waiting.appendleft((number, data))
            raise
        finally:
            with self._changed:
                self._uploading -= 1
                self._changed.notify_all()

    def _start(self) -> None:
        with self._starting:
            if not self._upload_id:
                answer = self._create()
                self._sums_parts = answer.get("ChecksumAlgorithm") == _CHECKSUM
                # A store that supports only checksums of parts would compare that of the file with a
                # different one.
                self._sums_whole = self._sums_parts and answer.get("ChecksumType") == _WHOLE
                if not self._sums_whole:
                    _tell_once(self._bucket)
                self._upload_id = answer["UploadId"]

    def _create(self) -> Any:
        target = {
            "Bucket": self._bucket,
            "Key": self._key,
            "Metadata": {_MARK: self._mark},
            **self._encryption,
        }
        try:
            return self._client.create_multipart_upload(
                **target, ChecksumAlgorithm=_CHECKSUM, ChecksumType=_WHOLE
            )
        except _errors() as error:
            if _status(error) not in (400, 501):
                raise
            return self._client.create_multipart_upload(
                **target
            )  # the store does not support checksums


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def part_bytes(parts: int) -> int:
    """Return the size of the next part of a file that has this number of them.

    After `EQUAL_PARTS` it grows from ten times the size on, by 0.08 % with each part. So 10,000 parts hold
    5 TiB, the most that an object of S3 may have, and none exceeds the 5 GiB that a part may have.
    """
    if parts < EQUAL_PARTS:
        return PART_BYTES
    return int(10 * PART_BYTES * 1.0008 ** (parts - EQUAL_PARTS))


class _PartStream(io.RawIOBase):
    """A stream that cuts its bytes into parts."""

    def __init__(self, add_part: Callable[[bytes], None]) -> None:
        self._add_part = add_part
        self._buffer = bytearray()
        self._size = 0
        self._parts = 0
        self._muted = False

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        if self._muted:
            return len(view)
        self._buffer += view
        self._size += len(view)
        while len(self._buffer) >= (size := part_bytes(self._parts)):
            self._add_part(bytes(self._buffer[:size]))
            del self._buffer[:size]
            self._parts += 1
        return len(view)

    def tell(self) -> int:
        return self._size

    def waiting(self) -> bytes:
        """Return the bytes that are not in a part yet."""
        return bytes(self._buffer)

    def mute(self) -> None:
        """Ignore all later writes, as the file is no longer wanted."""
        self._muted = True
        self._buffer.clear()

    def end(self) -> None:
        """Make the rest a part. `close` does not do this, as the garbage collector calls it too."""
        if self._buffer:
            self._add_part(bytes(self._buffer))
            self._buffer.clear()


def _complete(client: Any, committable: Committable) -> None:
    """Complete an upload, unless that has happened already."""
    bucket, _, key = committable.target.partition("/")
    parts: list[dict[str, Any]] = [
        {"PartNumber": number, "ETag": etag} for number, etag in enumerate(committable.parts, 1)
    ]
    check(parts, "a committable without parts", target=committable.target)
    for part, checksum in zip(parts, committable.part_sums, strict=False):
        part[f"Checksum{_CHECKSUM}"] = checksum
    whole = {}
    if committable.whole_sum:
        whole = {f"Checksum{_CHECKSUM}": committable.whole_sum, "ChecksumType": _WHOLE}
    try:
        client.complete_multipart_upload(
            Bucket=bucket,
            Key=key,
            UploadId=committable.upload_id,
            MultipartUpload={"Parts": parts},
            **whole,
        )
    except _errors() as error:
        # It does not matter whether it was done before, or by another attempt, or now but with its answer
        # lost.
        if _is_there(client, committable):
            return
        if _code(error) == "BadDigest":
            raise CorruptError(
                f"the store has damaged a file that was to be committed target=`s3://{committable.target}` "
                f"expected_crc32=`{committable.whole_sum}`: {error}",
                fix="restore an older checkpoint (--from DIR@ID): records behind it are written again, "
                "also those that other files hold already",
            ) from error
        if _code(error) != "NoSuchUpload":
            raise _perhaps_away("committed", committable.target, error) from error
        raise JobError(
            f"an upload of the checkpoint is gone, and its object is not there "
            f"target=`s3://{committable.target}` upload_id=`{committable.upload_id}`",
            fix="look for a lifecycle rule that aborts uploads sooner than jobs are restarted; if the "
            f"object was committed and then moved away, put it back for the restart; {DROPPED_FIX}",
        ) from error


def _perhaps_away(what: str, path: str, error: Exception) -> StorageError:
    """Return the error of a request; one after which it is worth trying again says so."""
    from botocore.exceptions import ClientError

    found = failed(what, f"s3://{path}", error)
    refused = isinstance(error, ClientError) and _status(error) < 500 and _status(error) != 429
    return found if refused else TargetAwayError(found.message)


def _is_there(client: Any, committable: Committable) -> bool:
    """Return True if the object exists and is ours."""
    found = _found(client, committable)
    return found is not None and bool(found["ContentLength"] == committable.size_bytes)


def _found(client: Any, committable: Committable) -> Any:
    """Return the description of an object that exists and has our mark; None: there is none."""
    bucket, _, key = committable.target.partition("/")
    try:
        found = client.head_object(Bucket=bucket, Key=key)
    except _errors() as error:
        if _code(error) in _ABSENT:
            return None
        raise _perhaps_away("committed", committable.target, error) from error
    return found if found.get("Metadata", {}).get(_MARK) == committable.mark else None


def _delete_object(client: Any, bucket: str, key: str) -> None:
    try:
        client.delete_object(Bucket=bucket, Key=key)
    except _errors() as error:
        raise _perhaps_away("deleted", f"{bucket}/{key}", error) from error


def _abort(client: Any, bucket: str, key: str, upload_id: str) -> None:
    try:
        client.abort_multipart_upload(Bucket=bucket, Key=key, UploadId=upload_id)
    except _errors() as error:
        if _code(error) != "NoSuchUpload":
            raise failed("discarded", f"s3://{bucket}/{key}", error) from error


def _listed(pages: Any, location: Location) -> Iterator[Any]:
    try:
        yield from pages
    except _errors() as error:
        if _code(error) == "NoSuchBucket":
            raise _no_bucket(location, error) from error
        raise failed("listed", location, error) from error


def _no_bucket(location: Location, error: Exception) -> UsageError:
    return UsageError(
        f"the bucket of a sink cannot be reached bucket=`{location.bucket}`: {error}",
        fix="check its name, the credentials and s3.endpoint",
    )


def _errors() -> tuple[type[Exception], ...]:
    from botocore.exceptions import BotoCoreError, ClientError

    return (BotoCoreError, ClientError)


def _code(error: Exception) -> str:
    return str(getattr(error, "response", {}).get("Error", {}).get("Code", ""))


def _status(error: Exception) -> int:
    return int(getattr(error, "response", {}).get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


@lru_cache(maxsize=100)
def _tell_once(bucket: str) -> None:
    _log.info(
        "the store keeps no checksum of a whole upload, so damage to the bytes of a file before its "
        "commit would not be noticed bucket=`%s`",
        bucket,
    )


def _base64(checksum: int) -> str:
    """Return a CRC-32 in S3's form."""
    return b64encode(checksum.to_bytes(4, "big")).decode()


def _look_at(future: Any) -> None:
    """Look at the error: the part waits again, and `finish` reports the error."""
    if not future.cancelled():
        future.exception()
