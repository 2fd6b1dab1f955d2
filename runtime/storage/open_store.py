"""Opens the checkpoint store of an address, and shares stores among the subtasks of a worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import ParamSpec
from urllib.parse import unquote

import msgspec

from ...errors import UsageError
from ...operators.addresses import STORAGE_SCHEMES, check_address
from ...operators.extras import check_extra
from ..observe.figures import StorageFigures
from ..protocol import names
from .base import CheckpointStore
from .local import LocalStore
from .memory import MemoryStore

P = ParamSpec("P")
_EXAMPLES = "write a directory, file:///directory, s3://bucket/prefix or memory://name"


def open_store(uri: str, job_name: str, options: Mapping[str, str]) -> CheckpointStore:
    """Return the store of one job below `uri`; the caller awaits its `open()` before anything else.

    Args:
        uri: a directory, `file:///directory`, `s3://bucket/prefix`, or `memory://name`.
        job_name: each job has its own directory below the address.
        options: `s3.endpoint`, `s3.region`, `s3.path-style-access`; other keys are ignored.

    Raises:
        UsageError: the address is malformed, or the extra it needs is not installed.
    """
    return open_store_at(join_address(uri, names.job_dir(job_name)), options)


def join_address(uri: str, directory: str) -> str:
    """Return the address of `directory` below the address `uri`."""
    check_address(uri, STORAGE_SCHEMES)
    scheme, separator, rest = uri.rpartition("://")
    if not rest.strip() and scheme != "memory":
        raise UsageError(f"the storage address is empty address=`{uri}`", fix=_EXAMPLES)
    return f"{scheme}{separator}{rest.rstrip('/')}/{directory}"


def open_store_at(uri: str, options: Mapping[str, str]) -> CheckpointStore:
    """Return the store whose root is the address `uri` itself, such as the directory of a savepoint.

    Raises:
        UsageError: the address is malformed, or the extra it needs is not installed.
    """
    check_address(uri, STORAGE_SCHEMES)
    if "://" not in uri:
        return LocalStore(Path(uri).expanduser())
    # Not urlsplit: `?`, `#`, `%` and `[` are ordinary characters of a key.
    scheme, _, rest = uri.partition("://")
    if scheme == "file":
        return LocalStore(_file_path(uri, rest))
    if scheme == "memory":
        return MemoryStore(rest.strip("/"))
    return _s3(uri, rest, options)


def counted(
    opener: Callable[P, CheckpointStore], figures: StorageFigures
) -> Callable[P, CheckpointStore]:
    """The same opener, of stores that all count their requests in `figures`."""

    def opened(*args: P.args, **kwargs: P.kwargs) -> CheckpointStore:
        store = opener(*args, **kwargs)
        store.figures = figures
        return store

    return opened


def _file_path(uri: str, rest: str) -> Path:
    host, slash, path = rest.partition("/")
    if host not in ("", "localhost") or not slash:
        raise UsageError(
            f"a file address needs three slashes address=`{uri}`", fix="write file:///directory"
        )
    return Path("/" + unquote(path))


def _s3(uri: str, rest: str, options: Mapping[str, str]) -> CheckpointStore:
    bucket, _, prefix = rest.partition("/")
    if not bucket:
        raise UsageError(f"the bucket is missing address=`{uri}`", fix="write s3://bucket/prefix")
    # Connectors take a while to import, which a new process that reads one state should not wait
    # for.
    from ...connectors.s3_config import s3_service

    check_extra("s3", f"storage on S3 address=`{uri}`")
    from .s3 import S3Settings, S3Store

    return S3Store(S3Settings(bucket=bucket, prefix=prefix.strip("/"), service=s3_service(options)))


class _Shared(msgspec.Struct):
    store: CheckpointStore
    users: int = 0
    opened: bool = False
    opening: asyncio.Lock = msgspec.field(default_factory=asyncio.Lock)


class SharedStores:
    """One store per address for all subtasks of a worker."""

    def __init__(
        self,
        open_at: Callable[[str, Mapping[str, str]], CheckpointStore],
        options: Mapping[str, str],
    ) -> None:
        self._open_at = open_at
        self._options = options
        self._shared: dict[tuple[str, bool], _Shared] = {}

    @asynccontextmanager
    async def at(self, address: str, *, writable: bool = True) -> AsyncIterator[CheckpointStore]:
        """Open the store whose root is `address`; it is closed when the last such block ends.

        Raises:
            StorageError: it cannot be reached.
        """
        key = (address, writable)
        shared = self._shared.get(key)
        if shared is None:
            shared = self._shared[key] = _Shared(self._open_at(address, self._options))
        shared.users += 1
        try:
            async with shared.opening:
                if not shared.opened:
                    await shared.store.open(writable=writable)
                    shared.opened = True
            yield shared.store
        finally:
            shared.users -= 1
            if not shared.users:
                del self._shared[key]
                await shared.store.close()
