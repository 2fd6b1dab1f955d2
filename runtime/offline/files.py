"""State files as Parquet, read in part: row groups of some key groups, and some columns.

What is read is verified: the footer by the checksum in its handle, each row group by its checksum in the
footer.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from ...errors import CorruptError, MissingFileError, StateError
from ...state.checked_files import SeekableFile, row_group_extent
from ...state.snapshot import StateHandle
from ..protocol.checkpoints.segments import is_piece
from ..storage.base import CheckpointStore
from ..storage.local import LocalStore
from ..storage.open_store import open_store_at
from ..task.parquet_files import verify_row_group

T = TypeVar("T")


class OpenStore:
    """A checkpoint store for blocking callers: its loop runs in a thread of its own.

    Args:
        root: the address.
        options: what the storage needs.
        writable: False for one who only reads.
    """

    def __init__(self, root: str, options: Mapping[str, str], *, writable: bool = False) -> None:
        self.store: CheckpointStore = open_store_at(root, options)
        self._writable = writable
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="headgate-offline", daemon=True
        )

    def __enter__(self) -> OpenStore:
        self._thread.start()
        try:
            self.run(self.store.open(writable=self._writable))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self.store.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """The result of a call of the store."""
        future: Future[T] = asyncio.run_coroutine_threadsafe(call, self._loop)
        return future.result()

    def content(self, handle: StateHandle) -> bytes:
        """All bytes of a piece of state.

        Raises:
            StateError: it is missing, or its bytes are not the ones that were written.
        """
        data = handle.inline
        if data is None:
            assert handle.file is not None
            with self._found(handle):
                data = self.run(
                    self.store.read_range(handle.file, handle.offset, handle.size_bytes)
                    if is_piece(handle)
                    else self.store.read_file(handle.file)
                )
        if len(data) != handle.size_bytes or xxhash.xxh3_64_hexdigest(data) != handle.checksum:
            raise self._corrupt(handle, "its checksum differs")
        return data

    def download(self, handle: StateHandle, path: Path) -> None:
        """Put a file at a local path. Raises StateError as `content`."""
        if handle.inline is not None or is_piece(handle):
            path.write_bytes(self.content(handle))
            return
        assert handle.file is not None
        with self._found(handle):
            self.run(self.store.download(handle.file, path))
        digest = xxhash.xxh3_64()
        with path.open("rb") as file:
            while chunk := file.read(1 << 22):
                digest.update(chunk)
        if digest.hexdigest() != handle.checksum:
            raise self._corrupt(handle, "its checksum differs")

    @contextmanager
    def parquet(self, handle: StateHandle) -> Iterator[pq.ParquetFile]:
        """A table's file, of which only what is asked for is read.

        Raises:
            StateError: it is missing, or not the file that was written.
        """
        if handle.inline is not None:
            yield pq.ParquetFile(pa.BufferReader(self.content(handle)))
            return
        with self._source(handle) as source:
            self._check_footer(handle, source)
            try:
                with pq.ParquetFile(
                    source, page_checksum_verification=True, pre_buffer=not self._is_local
                ) as file:
                    yield file
            except pa.ArrowInvalid as error:
                raise self._corrupt(handle, error) from error
            except OSError as error:
                if error.errno is not None:
                    raise
                raise self._corrupt(handle, error) from error

    def verify_row_group(self, handle: StateHandle, file: pq.ParquetFile, group: int) -> None:
        """Compare the checksum of a row group of a table's file. Raises CorruptError if it differs."""
        if handle.inline is not None:
            return
        assert handle.file is not None
        start, end = row_group_extent(file.metadata, group)
        begin = handle.offset + start
        with self._found(handle):
            data = self.run(self.store.read_range(handle.file, begin, end - start))
        try:
            verify_row_group(file.metadata, group, data)
        except OSError as error:
            raise self._corrupt(handle, error) from error

    @property
    def _is_local(self) -> bool:
        return isinstance(self.store, LocalStore)

    @contextmanager
    def _source(self, handle: StateHandle) -> Iterator[Any]:
        name = handle.file
        assert name is not None
        if not self._is_local:
            remote = _Remote(self, name, handle.offset, handle.size_bytes)
            yield pa.PythonFile(remote, mode="r")
            return
        with self._found(handle):
            try:
                source = pa.memory_map(str(Path(self.store.describe()) / name))
            except FileNotFoundError as error:
                raise MissingFileError(f"a state file is missing name=`{name}`") from error
        with source:
            if is_piece(handle):
                piece = pa.py_buffer(source.read_at(handle.size_bytes, handle.offset))
                yield pa.BufferReader(piece)
            else:
                yield source

    def _check_footer(self, handle: StateHandle, source: Any) -> None:
        if handle.footer is None:
            return
        length, checksum = handle.footer
        with self._found(handle):
            source.seek(handle.size_bytes - length)
            data = source.read(length)
        if source.size() != handle.size_bytes or xxhash.xxh3_64_hexdigest(data) != checksum:
            raise self._corrupt(handle, "its footer is not the one that was written")

    @contextmanager
    def _found(self, handle: StateHandle) -> Iterator[None]:
        try:
            yield
        except MissingFileError as error:
            raise StateError(
                f"a file of state `{handle.state}` is missing file=`{handle.file}`",
                where=self.store.describe(),
                fix="a checkpoint goes when newer ones are complete: read again, or take a savepoint",
            ) from error

    def _corrupt(self, handle: StateHandle, reason: object) -> CorruptError:
        return CorruptError(
            f"a file of state `{handle.state}` is corrupt file=`{handle.file}` reason=`{reason}`",
            where=self.store.describe(),
            fix="read another checkpoint or savepoint",
        )


class _Remote(SeekableFile):
    """A file in a store, or a piece of one from `offset` on, of which each read is a request."""

    def __init__(self, opened: OpenStore, name: str, offset: int, size: int) -> None:
        super().__init__(size)
        self._opened, self._name, self._offset = opened, name, offset

    def read(self, size: int = -1) -> bytes:
        left = self._size - self._position
        length = left if size < 0 else min(size, left)
        if not length:
            return b""
        begin = self._offset + self._position
        call = self._opened.store.read_range(self._name, begin, length)
        data = self._opened.run(call)
        self._position += len(data)
        return data
