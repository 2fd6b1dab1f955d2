"""The checkpoint store: four calls for records, and a few more for bulk files.

Names are relative, `/`-separated, and made only by `runtime/protocol/names.py`. A store is bound to
one job's root (a directory, or a bucket and prefix). It holds two kinds of objects:

* **records**: small, the source of truth. `read`, `put`, `create_if_absent`, `delete`.
* **files**: state files, up to many GB, written once under a unique name, invisible until complete.
  `write_file`, `read_file`, `read_range`, `download`, `list_files`, `delete_files`; they count only
  once a record refers to them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Final, TypeAlias, final

import msgspec

from ..observe.figures import StorageFigures

CLEAN_UP_S: Final = 2.5
"""The time, in seconds, that a cancelled or failed call spends at most on removing what it had begun."""

FileContent: TypeAlias = bytes | memoryview | Path
"""The content of a state file: bytes, or a local file that has them."""


@final
class Created(msgspec.Struct, frozen=True):
    """The object did not exist; it now has our bytes."""


@final
class Existed(msgspec.Struct, frozen=True):
    """The object existed before, with the content `data`. It was not changed."""

    data: bytes


class CheckpointStore(ABC):
    """One job's part of durable storage. All calls may raise StorageError after their retries."""

    creates_are_atomic: ClassVar[bool] = False
    """True if the storage cannot give one name to two writers, as with hard links.

    Then nothing has to be proven, or checked again.
    """
    figures: StorageFigures
    """The counters of requests, if the store makes any; several stores may share them."""

    @abstractmethod
    async def open(self, *, writable: bool = True) -> None:
        """Connect, and probe the guarantees below.

        Args:
            writable: False for a reader: then nothing is probed, and nothing written.

        Raises:
            StorageError: unreachable, or the store ignores conditional writes.
        """

    @abstractmethod
    async def close(self) -> None:
        """Release connections."""

    @abstractmethod
    async def read(self, name: str) -> bytes | None:
        """Return the newest bytes of a record, None if there is none. Always reads the last write."""

    @abstractmethod
    async def put(self, name: str, data: bytes) -> None:
        """Create or replace a record atomically. Only for hints that may be stale."""

    async def put_private(self, name: str, data: bytes) -> bool:
        """Create or replace a record that only this user can read.

        Return False if the storage itself restricts no readers, as a bucket: then nothing was
        written.
        """
        return False

    @abstractmethod
    async def create_if_absent(self, name: str, data: bytes) -> Created | Existed:
        """Create a record unless it exists: linearizable, and durable when it returns.

        If the answer of an earlier try was lost, the retry finds our own bytes and reports `Created`.
        """

    @abstractmethod
    async def delete(self, name: str) -> None:
        """Delete a record; an absent one counts as success."""

    @abstractmethod
    async def write_file(self, name: str, data: FileContent) -> None:
        """Write a state file; durable on return, never visible in part (multipart if large)."""

    @abstractmethod
    async def read_file(self, name: str) -> bytes:
        """Return the whole file. Raises MissingFileError naming the object if it is missing."""

    @abstractmethod
    async def read_range(self, name: str, start: int, length: int) -> bytes:
        """Return bytes [start, start + length) of a file; fewer if it ends before.

        Otherwise like `read_file`.
        """

    @abstractmethod
    async def download(self, name: str, path: Path) -> None:
        """Copy a file to the local `path`, whose directory exists; an error leaves nothing there.

        Raises:
            MissingFileError: there is no such file.
        """

    @abstractmethod
    def list_files(self, prefix: str) -> AsyncIterator[tuple[str, int]]:
        """Yield name and size in bytes of every object whose name begins with `prefix`, in no order."""

    @abstractmethod
    async def list_directories(self) -> list[str]:
        """Return the names of the directories directly below the root, sorted."""

    @abstractmethod
    async def delete_files(self, names: Sequence[str]) -> None:
        """Delete files; absent ones are no error."""

    @abstractmethod
    async def delete_incomplete(self, prefix: str) -> int:
        """Remove unfinished files of dead writers below the directory `prefix/`; return how many.

        An empty `prefix` is the whole store. Active writers are interrupted, so call it only for
        writers that must not write.
        """

    @abstractmethod
    def describe(self) -> str:
        """Return the root as a user writes it: a path or an s3:// address."""


AddressOpener: TypeAlias = Callable[[str, Mapping[str, str]], CheckpointStore]
"""(address of a root, options) -> the store whose root it is, not yet opened."""
StoreOpener: TypeAlias = Callable[[str, str, Mapping[str, str]], CheckpointStore]
"""(storage address, job name, options) -> the store, not yet opened."""
