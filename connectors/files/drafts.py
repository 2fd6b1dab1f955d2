"""Drafts: files that are being written, and finished files that are not visible yet.

A *draft* is written and then finished: it is durable but invisible, and described by a committable. A
*target* is the place where drafts become files. Everything here is safe to repeat: a commit may run again
in another process after a crash, at any point.

A committable contains the checksum of its file. A local draft that changed while it waited is never
published; for parts on S3 see `s3_drafts.py`. The file itself has no checksum, because other programs
read it.

A small file may also be *held*: it is a durable draft that is merged with others before it becomes visible
(`compaction.py`).

* Local (here): a draft lies in `<directory>/.headgate/<job>/<sink>/` and is renamed into the directory.
* S3 (`s3_drafts.py`): a draft is a multipart upload to the final key; completing it makes it visible. A
  held file is an object below `<prefix>/.headgate/<job>/<sink>/`.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import msgspec
import pyarrow as pa
import xxhash

from ...errors import CorruptError, JobError, StorageError
from ...operators.sink import DROPPED_FIX, OutputFile
from ...state.checked_files import measure_file
from ...state.durable_files import make_directories, sync


class Committable(msgspec.Struct, frozen=True):
    """The description of a finished draft, sufficient to commit it from anywhere."""

    target: str
    """The place where the file becomes visible: a path, or bucket/key."""
    size_bytes: int
    draft: str = ""
    """The path of the local draft, or of a held file; on S3 it is bucket/key."""
    upload_id: str = ""
    parts: tuple[str, ...] = ()
    """The ETags of the parts of an S3 upload, in order."""
    mark: str = ""
    checksum: str = ""
    """For a local draft the xxh3-64 of the file, in hex. It is empty if an early build made the draft."""
    part_sums: tuple[str, ...] = ()
    """The CRC-32 of each part of an S3 upload, in S3's form; empty if the store keeps none for parts."""
    whole_sum: str = ""
    """The CRC-32 of the whole file in the same form; empty if the store keeps none."""
    held: bool = False
    """Whether this is a part of a file that becomes visible at `target` later (`compaction.py`)."""
    header_bytes: int = 0
    """The size of the header of a held file."""
    merged: tuple[str, ...] = ()
    """The drafts of the held files that this file was merged from."""


class Draft(Protocol):
    """A file being written."""

    @property
    def stream(self) -> io.RawIOBase:
        """The stream that takes the bytes of the file."""
        ...

    def finish(self) -> Committable:
        """Make the file durable; blocks. It may be called again after it raised or returned."""
        ...

    def hold(self) -> Committable | None:
        """Make the whole file durable where it can be read again, instead of finishing it; blocks.

        It may be called again after it raised or returned.

        Returns:
            None if the file is too large for that. It can be finished then.
        """
        ...

    def flush(self) -> None:
        """Write what waits in memory, as far as the file need not be finished for that; blocks."""
        ...

    def discard(self) -> None:
        """Give up the draft; later writes have no effect. Must not raise, nor block for long."""
        ...


class Target(Protocol):
    """The place for the files of one sink."""

    def prepare(self) -> None:
        """Make sure that files can be written here."""
        ...

    def begin(self, name: str) -> Draft:
        """Start and return a draft of the file `name`."""
        ...

    def begin_merged(self, name: str, held: Committable, place: str) -> Draft:
        """Start and return the draft `name` of the file that a group of held files becomes.

        Args:
            name: its name, if drafts have names of their own here.
            held: one of the group.
            place: where it becomes visible.
        """
        ...

    def content(self, held: Committable) -> pa.Buffer | None:
        """Return the content of a held file; None: it is gone.

        Raises:
            StorageError: it cannot be read.
        """
        ...

    def is_visible(self, held: Committable, last: Committable) -> bool:
        """Return True if a file is visible into which a whole group of held files was merged.

        Args:
            held: one of the group.
            last: the last one of the group.
        """
        ...

    def drop(self, drafts: Sequence[str]) -> None:
        """Delete held files; absent ones are no error."""
        ...

    def names(self, prefix: str) -> Iterator[str]:
        """Return the names of files here that begin with `prefix`, visible files and drafts."""
        ...

    def visible(self, prefix: str) -> Iterator[OutputFile]:
        """Return the visible files here whose names begin with `prefix`; none if the place is missing."""
        ...

    def delete(self, files: list[OutputFile]) -> int:
        """Delete those of the visible files that are unchanged, and return how many."""
        ...

    def drafts(self, prefix: str) -> Iterator[tuple[str, Callable[[], None]]]:
        """Return the names of drafts here that begin with `prefix`, each with a function that discards
        it.
        """
        ...

    def commit(self, committables: list[Committable]) -> None:
        """Make drafts visible that are not held, unless they are already.

        Raises:
            CorruptError: a draft has changed since it was written.
            JobError: a draft is gone.
            StorageError: a draft cannot be made visible.
        """
        ...


class LocalTarget:
    """A local directory. `direct`: files are visible while they are written, and nothing is synced."""

    def __init__(self, directory: str, job: str, sink: str, direct: bool) -> None:
        self._directory = Path(directory)
        # Names may contain slashes; quoting keeps them one path component each, and distinct.
        hidden = self._directory / ".headgate" / quoted(job) / quoted(sink)
        self._hidden = hidden
        self._drafts = self._directory if direct else hidden
        self._direct = direct

    def prepare(self) -> None:
        try:
            make_directories(self._drafts)
        except OSError as error:
            raise StorageError(
                f"the directory of a sink cannot be made path=`{self._drafts}`: {error}"
            ) from error

    def begin(self, name: str) -> Draft:
        try:
            return _LocalDraft(self._drafts / name, self._directory / name, self._direct)
        except OSError as error:
            raise failed("begun", self._drafts / name, error) from error

    def begin_merged(self, name: str, held: Committable, place: str) -> Draft:
        try:
            # The directory may be missing if the guarantee of the sink has changed since.
            make_directories(self._hidden)
            return _LocalDraft(self._hidden / name, Path(place), direct=False)
        except OSError as error:
            raise failed("begun", self._hidden / name, error) from error

    def content(self, held: Committable) -> pa.Buffer | None:
        try:
            with pa.memory_map(held.draft) as file:
                return file.read_buffer()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise failed("read", held.draft, error) from error

    def is_visible(self, held: Committable, last: Committable) -> bool:
        if os.path.exists(held.target):
            return True
        directory = os.path.dirname(held.target)
        return any(
            merged_by_restored(os.path.join(directory, file.name), held.target, last.draft)
            for file in files_in(directory)
        )

    def drop(self, drafts: Sequence[str]) -> None:
        for draft in drafts:
            try:
                Path(draft).unlink(missing_ok=True)
            except OSError as error:
                raise failed("deleted", draft, error) from error

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
                sync(directory)
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
            # After a failed sync the next one may succeed without having written anything.
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
                sync(self._path.parent)
        except OSError as error:
            self._broken = error
            raise failed("finished", self._path, error) from error
        draft = "" if self._direct else str(self._path)
        return Committable(
            str(self._target), self._size, draft=draft, checksum=self.stream.checksum()
        )

    def hold(self) -> Committable | None:
        return msgspec.structs.replace(self.finish(), held=True)

    def flush(self) -> None:
        return None

    def discard(self) -> None:
        if not self._direct:
            with suppress(OSError):
                self._path.unlink()


class _HashedFile(io.BufferedWriter):
    """A new file that computes the checksum of the bytes written into it."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "xb"))
        self._digest = xxhash.xxh3_64()

    def write(self, data: Any, /) -> int:
        self._digest.update(data)
        return super().write(data)

    def checksum(self) -> str:
        """Return the xxh3-64 of all written bytes, in hex."""
        return self._digest.hexdigest()


def _verify(committable: Committable) -> None:
    """Compare a local draft with the written bytes; raises FileNotFoundError if it is gone."""
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
    """Rename a draft into place. It does no harm if that has happened already, or happens elsewhere right
    now.
    """
    draft, target = committable.draft, committable.target
    if os.path.exists(draft):
        # The order matters: another attempt with the same checkpoint may commit the same file meanwhile.
        if os.path.exists(target) and os.path.exists(draft):
            raise StorageError(
                f"another file has the name of a file to commit target=`{target}` draft=`{draft}`",
                fix="move one of the two away; both hold data",
            )
        with suppress(FileNotFoundError):
            _verify(committable)
            os.replace(draft, target)
    if not os.path.exists(target):
        raise JobError(
            f"a file of the checkpoint is gone: neither pending nor committed target=`{target}` "
            f"draft=`{draft}`",
            fix="if it was committed and then moved away, put it back for the restart; files may be "
            f"moved once the next checkpoint is complete; {DROPPED_FIX}",
        )


def name_of_restored(target: str, last: str) -> str:
    """Return the place of the file into which an attempt merges a group of held files that it has restored.

    Args:
        target: the place of the file that the attempt which has begun the group makes of it.
        last: the draft of the last file of the group.
    """
    stem, _, suffix = target.rpartition(".")
    return f"{stem}-{_number_of(last):06}.{suffix}"


def merged_by_restored(place: str, target: str, last: str) -> bool:
    """Return True if `place` is what `name_of_restored` returns for a group with at least these files."""
    stem, _, suffix = target.rpartition(".")
    number = place.removeprefix(f"{stem}-").removesuffix(f".{suffix}")
    return number.isdecimal() and int(number) >= _number_of(last)


def _number_of(draft: str) -> int:
    """Return the number with which the name of a draft ends."""
    return int(draft.rpartition(".")[0].rpartition("-")[2])


def files_in(directory: str | Path) -> Iterator[OutputFile]:
    """Yield the files in a local directory; none if it is missing."""
    with suppress(FileNotFoundError), os.scandir(directory) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                yield OutputFile(entry.name, _version(entry.stat()))


def delete_files(directory: str | Path, files: list[OutputFile]) -> int:
    """Delete those of the files in a local directory that are unchanged, and return how many.

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
        sync(directory)
    return deleted


def _version(found: os.stat_result) -> str:
    """Return a version that changes when a file is changed or replaced."""
    return f"{found.st_mtime_ns:x}-{found.st_size:x}"


def quoted(name: str) -> str:
    """Return a name as one path component, different for different names."""
    quoted = quote(name, safe=" ")
    return quoted.replace(".", "%2E") if set(quoted) == {"."} else quoted


def failed(what: str, path: object, error: Exception) -> StorageError:
    """Return the error for a file that could not be begun, finished, committed ..."""
    return StorageError(f"a file could not be {what} path=`{path}`: {error}")
