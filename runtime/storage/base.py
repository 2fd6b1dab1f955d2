"""The checkpoint store: four calls for truth, and a few more for bulk files.

Names are relative, `/`-separated, and made only by `runtime/protocol/names.py`. A store is bound to one
job's root (a directory, or a bucket and prefix). Two kinds of objects live in it:

* **records**: small, the truth. `read`, `put`, `create_if_absent`, `delete`.
* **files**: state files, up to many GB, written once under a name nobody else uses, invisible until
  complete. `write_file`, `read_file`, `read_range`, `download`, `list_files`, `delete_files`; nothing is
  true about them until a record says so.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final, TypeAlias, final

CLEAN_UP_S: Final = 2.5
"""A cancelled or failed call spends at most about this long on removing what it had begun."""

FileContent: TypeAlias = bytes | memoryview | Path
"""The content of a state file: bytes, or a local file that has them."""


@final
@dataclass(frozen=True, slots=True)
class Created:
    """The object did not exist; it does now, with our bytes."""


@final
@dataclass(frozen=True, slots=True)
class Existed:
    """The object was there before us; `data` is what it holds. It was not changed."""

    data: bytes


class CheckpointStore(ABC):
    """One job's part of durable storage. All calls may raise StorageError after their retries."""

    creates_are_atomic: ClassVar[bool] = False
    """True if `create_if_absent` cannot give one name to two writers by the nature of the storage, such as
    hard links; then nothing has to be proven, or looked at twice."""

    @abstractmethod
    async def open(self, *, writable: bool = True) -> None:
        """Connect, and probe the guarantees below.

        Args:
            writable: False for one who only reads: then nothing is probed, and nothing written.

        Raises:
            StorageError: unreachable, or the store ignores conditional writes.
        """

    @abstractmethod
    async def close(self) -> None:
        """Release connections."""

    @abstractmethod
    async def read(self, name: str) -> bytes | None:
        """The newest bytes of a record, None if there is none. Reads what was last written, always."""

    @abstractmethod
    async def put(self, name: str, data: bytes) -> None:
        """Create or replace a record atomically. Only for hints that may be stale."""

    async def put_private(self, name: str, data: bytes) -> bool:
        """Create or replace a record that only this user reads.

        False if the storage itself keeps nobody out, as a bucket: then nothing was written.
        """
        return False

    @abstractmethod
    async def create_if_absent(self, name: str, data: bytes) -> Created | Existed:
        """Create a record unless it exists: linearizable, and durable when it returns.

        If the answer of an earlier try was lost, the retry finds our own bytes and reports `Created`.
        """

    @abstractmethod
    async def delete(self, name: str) -> None:
        """Delete a record. That it is absent already counts as success."""

    @abstractmethod
    async def write_file(self, name: str, data: FileContent) -> None:
        """Write a state file; durable when it returns, never visible in part (multipart if large)."""

    @abstractmethod
    async def read_file(self, name: str) -> bytes:
        """The whole file. Raises MissingFileError naming the object if it is missing."""

    @abstractmethod
    async def read_range(self, name: str, start: int, length: int) -> bytes:
        """Bytes [start, start + length) of a file; fewer if it ends before. Else like `read_file`."""

    @abstractmethod
    async def download(self, name: str, path: Path) -> None:
        """Copy a file to the local `path`, whose directory exists; an error leaves nothing there.

        Raises:
            MissingFileError: there is no such file.
        """

    @abstractmethod
    def list_files(self, prefix: str) -> AsyncIterator[tuple[str, int]]:
        """Name and size in bytes of every object whose name begins with `prefix`, in no order."""

    @abstractmethod
    async def list_directories(self) -> list[str]:
        """The names of the directories directly below the root, sorted."""

    @abstractmethod
    async def delete_files(self, names: Sequence[str]) -> None:
        """Delete files; absent ones are fine."""

    @abstractmethod
    async def delete_incomplete(self, prefix: str) -> int:
        """Remove what dead writers left of files below the directory `prefix/`; returns how many.

        An empty `prefix` is the whole store.

        Whoever is still writing one of them is interrupted: only for writers that must not write.
        """

    @abstractmethod
    def describe(self) -> str:
        """The root as a user writes it: a path or an s3:// address."""


AddressOpener: TypeAlias = Callable[[str, Mapping[str, str]], CheckpointStore]
"""(address of a root, options) -> the store whose root it is, not yet opened."""
StoreOpener: TypeAlias = Callable[[str, str, Mapping[str, str]], CheckpointStore]
"""(storage address, job name, options) -> the store, not yet opened."""
