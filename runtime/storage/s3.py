"""A checkpoint store in an S3 bucket, or any store with S3's conditional PutObject."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar

import aiohttp
import xxhash
from aiobotocore.config import AioConfig
from aiobotocore.credentials import (
    AioAssumeRoleCredentialFetcher,
    AioDeferredRefreshableCredentials,
)
from aiobotocore.session import get_session
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
    ResponseStreamingError,
)
from botocore.exceptions import ConnectionError as BotoConnectionError
from botocore.loaders import create_loader

from ...connectors.s3_config import S3Service, compatibility
from ...errors import MissingFileError, StorageError
from ..observe.figures import Operation, StorageFigures
from ..protocol import names
from .base import CLEAN_UP_S, CheckpointStore, Created, Existed, FileContent
from .probe import probe_conditional_create
from .retry import Retrier, RetryPolicy, Sleep

T = TypeVar("T")

MULTIPART_THRESHOLD_BYTES = 8 << 20
"""Larger files are uploaded in parts."""
MULTIPART_PART_BYTES = 8 << 20
"""Size of a part while 10,000 of them (S3's limit) are enough."""
MULTIPART_PARTS_MAX = 10_000
DOWNLOAD_CHUNK_BYTES = 1 << 20
DELETE_BATCH_MAX = 1000
"""Keys of one DeleteObjects call (S3's limit)."""

_THROTTLED_CODES = frozenset(
    {
        "BandwidthLimitExceeded",
        "RequestThrottled",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "TooManyRequestsException",
    }
)
_TRANSIENT_CODES = _THROTTLED_CODES | {
    "ConditionalRequestConflict",
    "InternalError",
    "InternalServerError",
    "OperationAborted",
    "PriorRequestNotComplete",
    "RequestTimeout",
    "RequestTimeoutException",
    "ServiceUnavailable",
}
_THROTTLED_STATUS = 429
_TRANSIENT_STATUS = frozenset({408, 429, 500, 502, 503, 504})
_TRANSIENT_ERRORS: tuple[type[BaseException], ...] = (
    HTTPClientError,
    BotoConnectionError,
    ResponseStreamingError,
    IncompleteReadError,
    aiohttp.ClientError,
    asyncio.TimeoutError,
    ConnectionError,
)


class _VanishedError(Exception):
    """An object existed when we tried to create it, and was gone when we read it."""


def is_transient(error: BaseException) -> bool:
    """True if the same call may succeed a moment later."""
    if isinstance(error, ClientError):
        return _code(error) in _TRANSIENT_CODES or _status(error) in _TRANSIENT_STATUS
    return isinstance(error, (*_TRANSIENT_ERRORS, _VanishedError))


def is_throttled(error: BaseException) -> bool:
    """True if the store refused a request because there are too many of them."""
    if not isinstance(error, ClientError):
        return False
    return _code(error) in _THROTTLED_CODES or _status(error) == _THROTTLED_STATUS


@dataclass(frozen=True, slots=True)
class S3Settings:
    """The place of the bucket. Credentials come from the usual AWS places."""

    bucket: str
    prefix: str
    service: S3Service


def aiobotocore_client(settings: S3Settings) -> Any:
    """An async context manager that yields a client; retries are ours, not botocore's."""
    return _connected(settings.service)


@cache
def _models() -> Any:
    """Return the descriptions of AWS's services, once for all clients: reading them takes longest."""
    return create_loader(get_session().get_config_variable("data_path"))


@contextlib.asynccontextmanager
async def _connected(service: S3Service) -> AsyncIterator[Any]:
    config: dict[str, Any] = {
        "retries": {"total_max_attempts": 1, "mode": "standard"},
        "max_pool_connections": service.connections_max,
        "connect_timeout": service.connect_timeout_ms / 1000,
        "read_timeout": service.timeout_ms / 1000,
    }
    config |= compatibility(service)
    session = get_session()
    session.register_component("data_loader", _models())
    region = service.region or None
    if service.role is not None:
        credentials = await session.get_credentials()
        if credentials is None:
            raise NoCredentialsError
        fetcher = AioAssumeRoleCredentialFetcher(
            partial(session.create_client, region_name=region),
            credentials,
            service.role.arn,
            extra_args=service.role.arguments(),
        )
        # The client asks it for credentials, which are renewed before they expire.
        session._credentials = AioDeferredRefreshableCredentials(
            fetcher.fetch_credentials, "assume-role"
        )
    async with session.create_client(
        "s3",
        endpoint_url=service.endpoint or None,
        region_name=region,
        config=AioConfig(**config),
    ) as client:
        yield client


class S3Store(CheckpointStore):
    """Objects below one prefix. Records are single PutObject calls: whole or not there."""

    def __init__(
        self,
        settings: S3Settings,
        *,
        policy: RetryPolicy | None = None,
        sleep: Sleep = asyncio.sleep,
        rng: random.Random | None = None,
        connect: Callable[[S3Settings], Any] = aiobotocore_client,
    ) -> None:
        self._settings = settings
        service = settings.service
        self._keys = Keys(settings.prefix, service.entropy_key, service.entropy_length)
        self._rng = rng if rng is not None else random.Random()
        self._retrier = Retrier(
            policy if policy is not None else RetryPolicy(settings.service.attempts_max),
            transient=is_transient,
            sleep=sleep,
            rng=self._rng,
        )
        self._connect = connect
        self._resources = contextlib.AsyncExitStack()
        self._client: Any = None
        self.figures = StorageFigures()

    async def open(self, *, writable: bool = True) -> None:
        try:
            self._client = await self._resources.enter_async_context(self._connect(self._settings))
        except BotoCoreError as error:
            raise self._failed("connect to", "", error) from error
        if not writable:
            return
        try:
            await probe_conditional_create(self, self._rng)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        self._client = None
        await self._resources.aclose()

    async def read(self, name: str) -> bytes | None:
        return await self._run("read", name, lambda: self._get(name))

    async def put(self, name: str, data: bytes) -> None:
        await self._run("write", name, lambda: self._put(name, data))

    async def create_if_absent(self, name: str, data: bytes) -> Created | Existed:
        async def create() -> Created | Existed:
            try:
                await self._put(name, data, IfNoneMatch="*")
            except ClientError as error:
                if _status(error) != 412 and _code(error) != "PreconditionFailed":
                    raise
                existing = await self._get(name)
                if existing is None:
                    raise _VanishedError from error
                # Our own bytes: an earlier try went through and only its answer was lost.
                return Created() if existing == data else Existed(existing)
            return Created()

        return await self._run("create", name, create)

    async def delete(self, name: str) -> None:
        await self._run(
            "delete",
            name,
            lambda: self._client.delete_object(Bucket=self._settings.bucket, Key=self._key(name)),
        )

    async def write_file(self, name: str, data: FileContent) -> None:
        """As in the base class. Cancellation aborts a multipart upload; nothing becomes visible."""
        size = data.stat().st_size if isinstance(data, Path) else memoryview(data).nbytes
        if size <= MULTIPART_THRESHOLD_BYTES:
            body = await _part(data, 0, size)
            await self._run("write", name, lambda: self._put(name, body))
        else:
            await self._write_parts(name, data, size)

    async def read_file(self, name: str) -> bytes:
        data = await self.read(name)
        if data is None:
            raise self._missing(name)
        return data

    async def read_range(self, name: str, start: int, length: int) -> bytes:
        if not length:
            return b""
        wanted = f"bytes={start}-{start + length - 1}"

        async def read() -> bytes | None:
            try:
                return await self._get(name, Range=wanted)
            except ClientError as error:
                if _status(error) != 416:  # the file ends before `start`
                    raise
                return b""

        data = await self._run("read", name, read)
        if data is None:
            raise self._missing(name)
        return data

    async def download(self, name: str, path: Path) -> None:
        """As in the base class. After a transient error it goes on where it stopped."""
        with path.open("wb") as file:
            try:
                await self._run("read", name, lambda: self._download_rest(name, file))
            except BaseException:
                path.unlink(missing_ok=True)
                raise

    async def list_files(self, prefix: str) -> AsyncIterator[tuple[str, int]]:
        async for name, item in self._found("list_objects_v2", "Contents", prefix):
            yield name, item["Size"]

    async def list_directories(self) -> list[str]:
        root = self._keys.root
        found = self._pages("list_objects_v2", "CommonPrefixes", root, Delimiter="/")
        return sorted([item["Prefix"][len(root) :].rstrip("/") async for item in found])

    async def delete_files(self, names: Sequence[str]) -> None:
        for first in range(0, len(names), DELETE_BATCH_MAX):
            await self._delete_batch(names[first : first + DELETE_BATCH_MAX])

    async def delete_incomplete(self, prefix: str) -> int:
        """As in the base class: multipart uploads that were neither completed nor aborted."""
        count = 0
        below = f"{prefix}/" if prefix else ""
        async for _, item in self._found("list_multipart_uploads", "Uploads", below):
            upload = {"Key": item["Key"], "UploadId": item["UploadId"]}
            await self._abort_upload(item["Key"], {"Bucket": self._settings.bucket, **upload})
            count += 1
        return count

    def describe(self) -> str:
        root = f"s3://{self._settings.bucket}/{self._settings.prefix}"
        endpoint = self._settings.service.endpoint
        return f"{root} endpoint=`{endpoint}`" if endpoint else root

    # Single calls.

    def _key(self, name: str) -> str:
        return self._keys.key(name)

    async def _put(self, name: str, data: bytes, **condition: str) -> None:
        await self._client.put_object(
            Bucket=self._settings.bucket,
            Key=self._key(name),
            Body=data,
            **self._settings.service.encryption(),
            **condition,
        )
        self.figures.written_bytes += len(data)

    def _missing(self, name: str) -> MissingFileError:
        scattered = self._key(name) != f"{self._keys.root}{name}"
        return MissingFileError(
            f"a state file is missing name=`{name}`",
            where=self.describe(),
            fix="was it written with another s3.entropy.key or s3.entropy.length?"
            if scattered
            else "",
        )

    async def _get(self, name: str, **part: str) -> bytes | None:
        try:
            answer = await self._client.get_object(
                Bucket=self._settings.bucket, Key=self._key(name), **part
            )
        except ClientError as error:
            if _code(error) == "NoSuchKey":
                return None
            raise
        async with answer["Body"] as body:
            data: bytes = await body.read()
        self.figures.read_bytes += len(data)
        return data

    async def _download_rest(self, name: str, file: BinaryIO) -> None:
        target = {"Bucket": self._settings.bucket, "Key": self._key(name)}
        if file.tell():
            target["Range"] = f"bytes={file.tell()}-"
        try:
            answer = await self._client.get_object(**target)
        except ClientError as error:
            if _code(error) == "NoSuchKey":
                raise self._missing(name) from None
            if _status(error) == 416:  # the last try had everything, and lost only the end
                return
            raise
        async with answer["Body"] as body:
            while chunk := await body.read(DOWNLOAD_CHUNK_BYTES):
                self.figures.read_bytes += len(chunk)
                await asyncio.to_thread(file.write, chunk)

    async def _found(
        self, call: str, field: str, prefix: str
    ) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """All items of a listing of names that begin with `prefix`, with their names."""
        async for item in self._pages(call, field, self._keys.listed(prefix)):
            name = self._keys.name(item["Key"])
            if name is not None and name.startswith(prefix):
                yield name, item

    async def _pages(
        self, call: str, field: str, prefix: str, **more: str
    ) -> AsyncIterator[dict[str, Any]]:
        """All items of a listing of the keys that begin with `prefix`.

        `more` are further arguments of the call.
        """
        request = {"Bucket": self._settings.bucket, "Prefix": prefix, **more}
        while True:
            answer = await self._run("list", prefix, lambda: getattr(self._client, call)(**request))
            for item in answer.get(field, ()):
                yield item
            if not answer.get("IsTruncated"):
                return
            for marker in ("ContinuationToken", "KeyMarker", "UploadIdMarker"):
                if f"Next{marker}" in answer:
                    request[marker] = answer[f"Next{marker}"]

    async def _delete_batch(self, names: Sequence[str]) -> None:
        keys = [{"Key": self._key(name)} for name in names]
        answer = await self._run(
            "delete",
            names[0],
            lambda: self._client.delete_objects(
                Bucket=self._settings.bucket, Delete={"Objects": keys, "Quiet": True}
            ),
            verb="delete files, first",
        )
        refused = answer.get("Errors", [])
        if refused:
            raise StorageError(
                f"cannot delete checkpoint objects count=`{len(refused)}` "
                f"first=`{refused[0].get('Key')}` cause=`{refused[0].get('Code')}`",
                where=self.describe(),
                fix="allow s3:DeleteObject below this prefix",
            )

    # Multipart upload.

    async def _write_parts(self, name: str, data: FileContent, size: int) -> None:
        target = {"Bucket": self._settings.bucket, "Key": self._key(name)}
        answer = await self._run(
            "write",
            name,
            lambda: self._client.create_multipart_upload(
                **target, **self._settings.service.encryption()
            ),
        )
        upload = {**target, "UploadId": answer["UploadId"]}
        try:
            parts = await self._upload_parts(name, data, size, upload)
            await self._run("write", name, lambda: self._complete_upload(upload, parts, size))
        except BaseException:
            await self._abort_upload(name, upload)
            raise

    async def _upload_parts(
        self, name: str, data: FileContent, size: int, upload: dict[str, str]
    ) -> list[dict[str, Any]]:
        part_bytes = max(MULTIPART_PART_BYTES, -(-size // MULTIPART_PARTS_MAX))
        # Each part under way is a copy in memory.
        gate = asyncio.Semaphore(self._settings.service.upload_parts_max)

        async def upload_part(number: int) -> dict[str, Any]:
            async with gate:
                body = await _part(data, (number - 1) * part_bytes, part_bytes)
                answer = await self._run(
                    "write",
                    name,
                    lambda: self._client.upload_part(PartNumber=number, Body=body, **upload),
                )
                self.figures.written_bytes += len(body)
            return {"PartNumber": number, "ETag": answer["ETag"]}

        count = -(-size // part_bytes)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(upload_part(n)) for n in range(1, count + 1)]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0]  # noqa: B904  it carries its own cause
        return [task.result() for task in tasks]

    async def _complete_upload(
        self, upload: dict[str, str], parts: list[dict[str, Any]], size: int
    ) -> None:
        try:
            await self._client.complete_multipart_upload(MultipartUpload={"Parts": parts}, **upload)
        except ClientError as error:
            if _code(error) != "NoSuchUpload":
                raise
            # An earlier try may have gone through without an answer; no other writer uses this name.
            head = await self._client.head_object(Bucket=upload["Bucket"], Key=upload["Key"])
            if head["ContentLength"] != size:
                raise

    async def _abort_upload(self, name: str, upload: dict[str, str]) -> None:
        """Best effort, also while being cancelled; what remains, the next generation removes."""

        async def abort() -> None:
            with contextlib.suppress(StorageError, TimeoutError):
                async with asyncio.timeout(CLEAN_UP_S):
                    await self._run(
                        "delete",
                        name,
                        lambda: self._client.abort_multipart_upload(**upload),
                        verb="abort",
                    )

        await asyncio.shield(asyncio.ensure_future(abort()))

    # Errors.

    async def _run(
        self, operation: Operation, name: str, call: Callable[[], Awaitable[T]], verb: str = ""
    ) -> T:
        """The result of a call, with retries; `verb` is what an error says that cannot be done."""
        tries = 0

        async def counted() -> T:
            nonlocal tries
            tries += 1
            self.figures.retries[operation] += tries > 1
            with self.figures.request(operation, is_throttled):
                return await call()

        try:
            return await self._retrier.run(counted)
        except (ClientError, BotoCoreError, _VanishedError, *_TRANSIENT_ERRORS) as error:
            raise self._failed(verb or operation, name, error) from error

    def _failed(self, verb: str, name: str, error: BaseException) -> StorageError:
        cause = _code(error) if isinstance(error, ClientError) else type(error).__name__
        return StorageError(
            f"cannot {verb} a checkpoint object name=`{name}` cause=`{cause}` detail=`{error}`",
            where=self.describe(),
            fix=_advice(error),
        )


async def _part(data: FileContent, start: int, length: int) -> bytes:
    """A copy of bytes [start, start + length)."""
    if isinstance(data, Path):
        path = data
        return await asyncio.to_thread(_read_part, path, start, length)
    return bytes(memoryview(data).cast("B")[start : start + length])


def _read_part(path: Path, start: int, length: int) -> bytes:
    handle = os.open(path, os.O_RDONLY)
    try:
        return os.pread(handle, length, start)
    finally:
        os.close(handle)


def _advice(error: BaseException) -> str:
    if isinstance(error, NoCredentialsError | PartialCredentialsError):
        return "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the pod a role"
    if isinstance(error, ClientError):
        if _code(error) == "NoSuchBucket":
            return "create the bucket first, or correct its name"
        if _status(error) in (401, 403):
            return (
                "allow s3:GetObject, s3:PutObject, s3:DeleteObject, s3:AbortMultipartUpload below this "
                "prefix, and s3:ListBucket on the bucket (without it a missing object looks forbidden)"
            )
    if is_transient(error):
        return "the store did not answer in time, several times over: is it reachable, and healthy?"
    return ""


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _status(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


ENTROPY_MAX: Final = 16
"""The most characters of entropy, those of the hash."""
_FILES: Final = f"{names.CHECKPOINTS}/"


class Keys:
    """The keys of the objects below one root, by their names.

    S3 limits the rate of requests per prefix of keys. If the address of a storage contains the text
    `s3.entropy.key`, the keys of state files of checkpoints have some characters there that differ from
    file to file, and the keys of all other objects have nothing there. The characters are a hash of the
    name, so that the key of a name is known without a look at anything else.
    """

    def __init__(self, prefix: str, entropy_key: str = "", entropy_length: int = 0) -> None:
        """Begin.

        Args:
            prefix: the root, without a slash at its ends.
            entropy_key: the text that is replaced; empty: none is.
            entropy_length: the number of characters that replace it.
        """
        before, found, after = prefix.partition(entropy_key) if entropy_key else (prefix, "", "")
        self._before = before
        self._after = f"{after}/" if after else "/"
        self._length = min(entropy_length, ENTROPY_MAX) if found else 0
        joined = (
            f"{before}{after.removeprefix('/')}" if before.endswith("/") else f"{before}{after}"
        )
        plain = joined.strip("/")
        self.root = f"{plain}/" if plain else ""
        """The beginning of the keys of all objects without entropy."""

    def key(self, name: str) -> str:
        """Return the key of an object."""
        if not self._length or not name.startswith(_FILES):
            return f"{self.root}{name}"
        entropy = xxhash.xxh3_64_hexdigest(name.encode())[: self._length]
        return f"{self._before}{entropy}{self._after}{name}"

    def name(self, key: str) -> str | None:
        """Return the name of the object with a key; None: it is not below this root."""
        if self._length and key.startswith(self._before):
            rest = key[len(self._before) + self._length :]
            name = rest.removeprefix(self._after)
            if name != rest and name.startswith(_FILES) and self.key(name) == key:
                return name
        if key.startswith(self.root):
            name = key[len(self.root) :]
            return name if self.key(name) == key else None
        return None

    def listed(self, prefix: str) -> str:
        """Return what the keys of all objects begin with whose names begin with a text.

        Keys of other roots may begin with it as well, if there is entropy.
        """
        files = prefix.startswith(_FILES) or _FILES.startswith(prefix)
        return self._before if self._length and files else f"{self.root}{prefix}"
