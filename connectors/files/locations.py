"""Locations of files: local paths and s3:// addresses, and how to reach them.

Settings of S3 come, in this order, from the connector's own `storage_options`, from the job's options of
the same names (`s3.endpoint`, `s3.region`), and from the environment (`AWS_ENDPOINT_URL`, `AWS_REGION`).
Credentials come from AWS's usual chain only: environment, shared files, web identity, instance role.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.fs as pafs

from ...errors import OptionError, StorageError, UsageError
from ...operators.addresses import check_address
from ...operators.extras import check_extra
from ...operators.origin import capture_origin
from ..s3_config import S3_OPTIONS, S3Service, compatibility, s3_service

_REGION = "us-east-1"
"""The region if none is given: services other than AWS take any, and AWS knows that of the bucket."""
REQUESTS_MAX = 8
"""The number of files that are inspected at the same time, to find out what there is to read."""


@dataclass(frozen=True, slots=True)
class Location:
    """A path on a local file system, or a bucket and key (`bucket/key`) on S3."""

    scheme: str
    path: str

    def __str__(self) -> str:
        return self.path if self.scheme == "file" else f"s3://{self.path}"

    @property
    def bucket(self) -> str:
        return self.path.partition("/")[0]

    @property
    def key(self) -> str:
        return self.path.partition("/")[2]


PathLike: TypeAlias = str | os.PathLike[str]
"""A local path, or an address as text."""


def address_of(path: PathLike) -> str:
    """Return a path as text. Raises UsageError if it is not a path."""
    if isinstance(path, str | os.PathLike):
        address = os.fspath(path)
        if isinstance(address, str) and address:
            return address
    got = "an empty text" if path == "" else f"`{type(path).__name__}`"
    raise UsageError(
        f"a path is a text or a pathlib.Path, got {got}",
        where=str(capture_origin()),
        fix="give one path: a file, a directory or a glob such as data/*.csv, or s3://bucket/prefix",
    )


def parse_location(address: str) -> Location:
    """Return the location of a path, a file:// or an s3:// address.

    Raises:
        UsageError: the address is empty, or of another scheme.
    """
    if not address:
        raise UsageError("the path is empty")
    check_address(address, ("file", "s3", "s3a"))
    scheme, separator, rest = address.partition("://")
    if not separator:
        return Location("file", os.path.abspath(os.path.expanduser(address)))
    if scheme == "file":
        return Location("file", os.path.abspath(rest))
    if not rest.partition("/")[0]:
        raise UsageError(f"the address names no bucket address=`{address}`")
    return Location("s3", rest.rstrip("/"))


def check_storage_options(options: Mapping[str, str] | None) -> dict[str, str]:
    """Return a copy of `options`, and check that all keys are known."""
    for key in options or {}:
        if key not in S3_OPTIONS:
            raise OptionError(
                f"unknown storage option key=`{key}`", fix=f"known: {', '.join(S3_OPTIONS)}"
            )
    return dict(options or {})


def of_storage(options: Mapping[str, str]) -> dict[str, str]:
    """Return those of a job's options that say how to reach a storage."""
    return {key: options[key] for key in S3_OPTIONS if key in options}


def filesystem(scheme: str, options: Mapping[str, str]) -> pafs.FileSystem:
    """Return the Arrow file system for locations of `scheme`."""
    if scheme == "file":
        return pafs.LocalFileSystem()
    return _s3_filesystem(s3_service(options))


@cache
def _s3_filesystem(service: S3Service) -> pafs.FileSystem:
    arguments: dict[str, Any] = {
        "region": service.region or _REGION,
        "connect_timeout": service.connect_timeout_ms / 1000,
        "request_timeout": service.timeout_ms / 1000,
        "retry_strategy": pafs.AwsStandardS3RetryStrategy(max_attempts=service.attempts_max),
    }
    if service.endpoint:
        arguments["endpoint_override"] = service.endpoint
        arguments["force_virtual_addressing"] = not service.path_style
    if service.role is not None:
        arguments["role_arn"] = service.role.arn
        arguments["session_name"] = service.role.session
        arguments["external_id"] = service.role.external_id or None
    return pafs.S3FileSystem(**arguments)


def s3_client(options: Mapping[str, str]) -> Any:
    """Return a boto3 client, which several threads may use."""
    return _s3_client(s3_service(options))


@cache
def _s3_client(service: S3Service) -> Any:
    check_extra("s3", "writing to S3")
    import boto3
    from botocore.config import Config
    from botocore.credentials import AssumeRoleCredentialFetcher, DeferredRefreshableCredentials
    from botocore.session import get_session

    config = Config(
        connect_timeout=service.connect_timeout_ms / 1000,
        read_timeout=service.timeout_ms / 1000,
        max_pool_connections=service.connections_max,
        retries={"mode": "standard", "total_max_attempts": service.attempts_max},
        **compatibility(service),
    )
    session = get_session()
    region = service.region or _REGION
    if service.role is not None:
        credentials = session.get_credentials()
        if credentials is None:
            raise UsageError(
                f"there are no credentials with which to assume a role role=`{service.role.arn}`",
                fix="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the pod a role",
            )
        fetcher = AssumeRoleCredentialFetcher(
            partial(session.create_client, region_name=region),
            credentials,
            service.role.arn,
            extra_args=service.role.arguments(),
        )
        session._credentials = DeferredRefreshableCredentials(
            fetcher.fetch_credentials, "assume-role"
        )
    return boto3.Session(botocore_session=session).client(
        "s3",
        endpoint_url=service.endpoint or None,
        region_name=region,
        config=config,
    )


_UNFINISHED = re.compile(r"\.tmp$|\.inprogress")
"""Names that many programs give to files until these are complete."""


@dataclass(frozen=True, slots=True)
class FileVersion:
    """A file as it was found. If any of this changes, positions in the file mean nothing any more."""

    path: str
    size_bytes: int
    version: str
    """The ETag on S3, otherwise the time of the last change in ns."""


def find_files(
    address: str, options: Mapping[str, str], *, may_grow: bool = False
) -> list[FileVersion]:
    """Return the sorted files of a path, a directory (recursively) or a glob (`*`, `?`, `[ab]`, `**`).

    Names that begin with `.` or `_` inside a directory are not data: they belong to programs that are
    writing.

    Args:
        address: the path.
        options: of the storage.
        may_grow: further files may come: see `growing_files`, which says what this changes.

    Raises:
        UsageError: there is no such file.
        StorageError: the file system failed.
    """
    found = listed(address, options, may_grow=may_grow)
    store = filesystem(parse_location(address).scheme, options)
    try:
        # On S3 each version costs a request.
        with ThreadPoolExecutor(REQUESTS_MAX, "headgate-listing") as threads:
            versions = list(threads.map(lambda info: version_of(store, info), found))
    except (OSError, pa.ArrowException) as error:
        raise _cannot_list(address, error) from error
    return [
        FileVersion(info.path, info.size, version)
        for info, version in zip(found, versions, strict=True)
    ]


def listed(
    address: str, options: Mapping[str, str], *, may_grow: bool = False
) -> list[pafs.FileInfo]:
    """Return the files that `find_files` returns, without their versions; it raises the same errors."""
    if may_grow:
        return growing_files(address, options)
    location = parse_location(address)
    try:
        found = _matches(filesystem(location.scheme, options), location)
    except (OSError, pa.ArrowException) as error:
        raise _cannot_list(address, error) from error
    if not found:
        raise UsageError(
            f"no file found path=`{address}`",
            fix="check the path; a directory is read with all files below it whose names do not begin "
            "with a dot or underscore",
        )
    return found


def check_readable(address: str, info: pafs.FileInfo, options: Mapping[str, str]) -> None:
    """Check that the first byte of a file can be read.

    Args:
        address: the path at which the file was found.
        info: the file.
        options: of the storage.

    Raises:
        StorageError: it cannot.
    """
    try:
        store = filesystem(parse_location(address).scheme, options)
        with store.open_input_file(info.path) as file:
            file.read(1)
    except (OSError, pa.ArrowException) as error:
        raise StorageError(
            f"a file cannot be read file=`{info.path}`: {error}", fix="check the rights of the user"
        ) from error


def check_directory(address: str, options: Mapping[str, str]) -> str:
    """Check that files may be written below an address, as far as that shows without writing one.

    Returns:
        What was found.

    Raises:
        UsageError: there is no such bucket, or the directory cannot be written to.
        StorageError: S3 does not answer, or refuses us.
    """
    location = parse_location(address)
    if location.scheme == "file":
        return _check_local_directory(location.path)
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        s3_client(options).list_objects_v2(Bucket=location.bucket, Prefix=location.key, MaxKeys=1)
    except ClientError as error:
        if error.response.get("Error", {}).get("Code") == "NoSuchBucket":
            raise UsageError(
                f"there is no such bucket path=`{location}`", fix="create it, or check the name"
            ) from error
        raise _not_listed(location, error) from error
    except BotoCoreError as error:
        raise _not_listed(location, error) from error
    return "the bucket can be listed; nothing was written to it"


def _check_local_directory(path: str) -> str:
    if os.path.isfile(path):
        raise UsageError(
            f"files are written into a directory, and there is a file of that name path=`{path}`",
            fix="give the path of a directory; it is made if it does not exist",
        )
    existing = path
    while not os.path.isdir(existing):
        existing = os.path.dirname(existing)
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UsageError(
            f"the user may not write to the directory path=`{existing}`", fix="change its rights"
        )
    return "the directory can be written to" if existing == path else "the directory will be made"


def _not_listed(location: Location, error: Exception) -> StorageError:
    return StorageError(
        f"the bucket cannot be used path=`{location}`: {error}",
        fix="check s3.endpoint, the credentials and the rights of the user",
    )


def growing_files(address: str, options: Mapping[str, str]) -> list[pafs.FileInfo]:
    """Return the files of a directory or glob into which other programs write, sorted.

    Files that are still being written are left out: names that end in `.tmp` or contain `.inprogress`,
    and files without a byte. There may be none.

    Raises:
        UsageError: the directory does not exist.
        StorageError: the file system failed.
    """
    location = parse_location(address)
    store = filesystem(location.scheme, options)
    base = re.split(r"[*?\[]", location.path, maxsplit=1)[0]
    if base != location.path:
        base = base.rpartition("/")[0]
    try:
        local = location.scheme == "file"  # a directory of S3 exists only while something is in it
        if local and store.get_file_info(base or "/").type == pafs.FileType.NotFound:
            raise UsageError(
                f"there is no such directory path=`{base}`",
                fix="create it; it may be empty when the job starts",
            )
        found = _matches(store, location)
    except (OSError, pa.ArrowException) as error:
        raise _cannot_list(address, error) from error
    return [info for info in found if info.size and not _UNFINISHED.search(info.base_name)]


def _cannot_list(address: str, error: Exception) -> StorageError:
    return StorageError(
        f"files cannot be listed path=`{address}`: {error}",
        fix="check the path and the rights; on S3 also the credentials and s3.endpoint",
    )


def _matches(store: pafs.FileSystem, location: Location) -> list[pafs.FileInfo]:
    path = location.path
    info = store.get_file_info(path)
    if info.type == pafs.FileType.File:
        return [info]
    if info.type == pafs.FileType.Directory:
        base, matches = path, re.compile(".*", re.DOTALL)
    else:
        plain = re.split(r"[*?\[]", path, maxsplit=1)[0]
        if plain == path:
            return []
        base, matches = plain.rpartition("/")[0], _glob(path)
    selector = pafs.FileSelector(base or "/", recursive=True, allow_not_found=True)
    below = len(base.rstrip("/")) + 1
    found = [
        info
        for info in store.get_file_info(selector)
        if info.type == pafs.FileType.File
        and matches.fullmatch(info.path)
        and not any(part.startswith((".", "_")) for part in info.path[below:].split("/"))
    ]
    return sorted(found, key=lambda info: info.path)


def _glob(pattern: str) -> re.Pattern[str]:
    """Return a glob as a regular expression: `*` and `?` stay within a directory, `**` does not."""
    parts = re.split(r"(\*\*/?|\*|\?|\[[^\]]+\])", pattern)
    translated = []
    for part in parts:
        if part == "**/":
            translated.append("(?:.*/)?")
        elif part == "**":
            translated.append(".*")
        elif part == "*":
            translated.append("[^/]*")
        elif part == "?":
            translated.append("[^/]")
        elif len(part) > 2 and part.startswith("["):
            translated.append(f"[{'^' if part[1] == '!' else ''}{part[1:-1].lstrip('!')}]")
        else:
            translated.append(re.escape(part))
    return re.compile("".join(translated), re.DOTALL)


def version_of(store: pafs.FileSystem, info: pafs.FileInfo) -> str:
    """Return a value that changes with the file: the ETag on S3, otherwise the time of the last change."""
    if isinstance(store, pafs.S3FileSystem):
        with store.open_input_file(info.path) as file:
            etag = file.metadata().get("ETag")
            if etag:
                return str(etag.decode())
    return str(info.mtime_ns)
