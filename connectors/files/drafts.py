"""Files between being written and being visible.

A *draft* is written, then finished: durable but invisible, described by a committable. A *target* is the
place where drafts become files. Everything here is safe to repeat: a commit may run again in another
process after a crash, at any point.

A committable knows the checksum of its file. A local draft that changed while it waited is never published;
`s3_drafts.py` says what is known of parts on S3. The file stays plain, because other programs read it.

* Local (here): a draft lies in `<directory>/.headgate/<job>/<sink>/` and is renamed into the directory.
* S3 (`s3_drafts.py`): a draft is a multipart upload to the final key; completing it makes it visible.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import msgspec
import xxhash

from ...errors import CorruptError, StorageError
from ...operators.sink import OutputFile
from ...state.checked_files import measure_file


class Committable(msgspec.Struct, frozen=True):
    """A finished draft: enough to commit it from anywhere."""

    target: str
    """Where it becomes visible: a path, or bucket/key."""
    size_bytes: int
    draft: str = ""
    """Path of the local draft."""
    upload_id: str = ""
    parts: tuple[str, ...] = ()
    """ETags of the parts of an S3 upload, in order."""
    mark: str = ""
    checksum: str = ""
    """xxh3-64 of the file, in hex, of a local draft. Empty: made by an early build, which had none."""
    part_sums: tuple[str, ...] = ()
    """CRC-32 of the parts of an S3 upload, as S3 writes it. Empty: the store keeps none of parts."""
    whole_sum: str = ""
    """CRC-32 of the whole file likewise. Empty: the store keeps none."""


class Draft(Protocol):
    """A file being written."""

    @property
    def stream(self) -> io.RawIOBase:
        """Where its bytes go."""
        ...

    def finish(self) -> Committable:
        """Make it durable; blocks. May be called again after it raised or returned."""
        ...

    def discard(self) -> None:
        """Forget it; what is written from here on goes nowhere. Must not raise, nor block for long."""
        ...


class Target(Protocol):
    """Where files of one sink go."""

    def prepare(self) -> None:
        """Make sure one can write here."""
        ...

    def begin(self, name: str) -> Draft:
        """Start a draft of the file `name`."""
        ...

    def names(self, prefix: str) -> Iterator[str]:
        """Names of the files here that begin with `prefix`, visible ones and drafts."""
        ...

    def visible(self, prefix: str) -> Iterator[OutputFile]:
        """The visible files here whose names begin with `prefix`; none if the place is missing."""
        ...

    def delete(self, files: list[OutputFile]) -> int:
        """Delete those of the visible files that are still there unchanged; returns how many."""
        ...

    def drafts(self, prefix: str) -> Iterator[tuple[str, Callable[[], None]]]:
        """Names of the drafts here that begin with `prefix`, each with a function that discards it."""
        ...

    def commit(self, committables: list[Committable]) -> None:
        """Make drafts visible, if they are not yet.

        Raises:
            CorruptError: a draft is not what was written.
            StorageError: a draft cannot be made visible.
        """
        ...


class LocalTarget:
    """A local directory. `direct`: files are visible while they are written, and nothing is synced."""

    def __init__(self, directory: str, job: str, sink: str, direct: bool) -> None:
        self._directory = Path(directory)
        # Names may contain slashes; quoting keeps them one path component each, and distinct.
        hidden = self._directory / ".headgate" / quoted(job) / quoted(sink)
        self._drafts = self._directory if direct else hidden
        self._direct = direct

    def prepare(self) -> None:
        try:
            _make_directories(self._drafts)
        except OSError as error:
            raise StorageError(
                f"the directory of a sink cannot be made path=`{self._drafts}`: {error}"
            ) from error

    def begin(self, name: str) -> Draft:
        try:
            return _LocalDraft(self._drafts / name, self._directory / name, self._direct)
        except OSError as error:
            raise failed("begun", self._drafts / name, error) from error

    def names(self, prefix: str) -> Iterator[str]:
        for directory in {self._directory, self._drafts}:
            yield from (name for name in os.listdir(directory) if name.startswith(prefix))

    def visible(self, prefix: str) -> Iterator[OutputFile]:
        return (file for file in files_in(self._directory) if file.name.startswith(prefix))

    def delete(self, files: list[OutputFile]) -> int:
        return delete_files(self._directory, files)

    def drafts(self, prefix: str) -> Iterator[tuple[str, Callable[[], None]]]:
        if not self._direct:
            for path in self._drafts.iterdir():
                if path.name.startswith(prefix):
                    yield path.name, partial(path.unlink, missing_ok=True)

    def commit(self, committables: list[Committable]) -> None:
        staged = [committable for committable in committables if committable.draft]
        try:
            for committable in staged:
                _publish(committable)
            for directory in {os.path.dirname(committable.target) for committable in staged}:
                _sync_directory(directory)
        except OSError as error:
            raise failed("committed", self._directory, error) from error


class _LocalDraft:
    def __init__(self, path: Path, target: Path, direct: bool) -> None:
        self._path, self._target, self._direct = path, target, direct
        self.stream: Any = _HashedFile(path)
        self._size: int | None = None
        self._broken: OSError | None = None

    def finish(self) -> Committable:
        if self._broken is not None:
            # A sync that failed once may succeed the next time without having written anything.
            raise failed("finished", self._path, self._broken) from self._broken
        try:
            if self._size is None:
                self.stream.flush()
                if not self._direct:
                    os.fsync(self.stream.fileno())
                size = self.stream.tell()
                self.stream.close()
                self._size = size
            if not self._direct:
                _sync_directory(self._path.parent)
        except OSError as error:
            self._broken = error
            raise failed("finished", self._path, error) from error
        draft = "" if self._direct else str(self._path)
        return Committable(
            str(self._target), self._size, draft=draft, checksum=self.stream.checksum()
        )

    def discard(self) -> None:
        if not self._direct:
            with suppress(OSError):
                self._path.unlink()


class _HashedFile(io.BufferedWriter):
    """A new file that knows the checksum of what was written into it."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "xb"))
        self._digest = xxhash.xxh3_64()

    def write(self, data: Any, /) -> int:
        self._digest.update(data)
        return super().write(data)

    def checksum(self) -> str:
        """xxh3-64 of all that was written, in hex."""
        return self._digest.hexdigest()


def _verify(committable: Committable) -> None:
    """Compare a local draft with what was written; raises FileNotFoundError if it is gone."""
    size, checksum = measure_file(Path(committable.draft))
    if size == committable.size_bytes and checksum == (committable.checksum or checksum):
        return
    raise CorruptError(
        f"a file that was to be committed is damaged draft=`{committable.draft}` "
        f"expected_bytes=`{committable.size_bytes}` bytes=`{size}` "
        f"expected_checksum=`{committable.checksum}` checksum=`{checksum}`",
        fix="bring the draft back from a copy, and start the job again; or restore an older checkpoint "
        "(--from DIR@ID): records behind it are written again, also those that other files hold already",
    )


def _publish(committable: Committable) -> None:
    """Rename a draft into place; that it happened already, or happens right now elsewhere, is fine."""
    draft, target = committable.draft, committable.target
    if os.path.exists(draft):
        # In this order: another attempt with the same checkpoint may commit the same file meanwhile.
        if os.path.exists(target) and os.path.exists(draft):
            raise StorageError(
                f"another file has the name of a file to commit target=`{target}` draft=`{draft}`",
                fix="move one of the two away; both hold data",
            )
        with suppress(FileNotFoundError):
            _verify(committable)
            os.replace(draft, target)
    if not os.path.exists(target):
        raise StorageError(
            f"a file of the checkpoint is gone: neither pending nor committed target=`{target}` "
            f"draft=`{draft}`",
            fix="if it was committed and then moved away, put it back for the restart; files may be "
            "moved once the next checkpoint is complete",
        )


def _make_directories(path: Path) -> None:
    """Like `mkdir -p`, and durable."""
    missing = []
    while not path.exists():
        missing.append(path)
        path = path.parent
    for directory in reversed(missing):
        directory.mkdir(exist_ok=True)
        _sync_directory(directory.parent)
    if not path.is_dir():
        raise NotADirectoryError(str(path))


def files_in(directory: str | Path) -> Iterator[OutputFile]:
    """The files in a local directory; none if it is missing."""
    with suppress(FileNotFoundError), os.scandir(directory) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                yield OutputFile(entry.name, _version(entry.stat()))


def delete_files(directory: str | Path, files: list[OutputFile]) -> int:
    """Delete those of the files in a local directory that are unchanged; returns how many.

    Raises:
        StorageError: the file system does not allow it.
    """
    deleted = 0
    for file in files:
        path = Path(directory, file.name)
        try:
            if _version(path.stat()) == file.version:
                path.unlink()
                deleted += 1
        except FileNotFoundError:
            continue
        except OSError as error:
            raise failed("deleted", path, error) from error
    with suppress(FileNotFoundError):
        _sync_directory(directory)
    return deleted


def _version(found: os.stat_result) -> str:
    """Differs if a file has been changed, or another one has its name."""
    return f"{found.st_mtime_ns:x}-{found.st_size:x}"


def _sync_directory(path: str | Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def quoted(name: str) -> str:
    """A name as one path component, different for different names."""
    quoted = quote(name, safe=" ")
    return quoted.replace(".", "%2E") if set(quoted) == {"."} else quoted


def failed(what: str, path: object, error: Exception) -> StorageError:
    """The error for a file that could not be begun, finished, committed ..."""
    return StorageError(f"a file could not be {what} path=`{path}`: {error}")
