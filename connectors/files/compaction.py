"""Compaction: the small files of several checkpoints are merged before they become visible.

A small file that ends is *held*: it is a durable draft, and part of each checkpoint from then on, but no
commit makes it visible. The held files of a writer form a group. Once the group is old or large enough, the
pre-commit of a checkpoint merges it into one draft, and this draft is committed like any other. So readers
see each record once, in a large file, and later than without compaction. What is held is deleted when the
merged file is visible, and not before, because a checkpoint that does not complete leaves the group as it
was.

The merged file has the name that the first file of the group would have had. Whether it is visible
therefore tells, also after a restore of an older checkpoint, whether a group has been committed.

A restore can find a group without the files that the job held behind the restored checkpoint, and a
savepoint may have the group with them. So the attempt that has restored a group adds the number of its last
file to the name of the merged file (`drafts.name_of_restored`), which tells what is in it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from ...errors import CorruptError, JobError
from ...operators.sink import DROPPED_FIX
from .drafts import Committable, Draft, Target, name_of_restored
from .formats import ParquetEncoder


class EndedFile(Protocol):
    """A file that takes no more records."""

    def hold(self, limit: int) -> Committable | None:
        """Make the file durable where it can be read again; None: it is not small. May be repeated."""
        ...

    def finish(self) -> Committable:
        """Make the file durable, ready to be committed. May be repeated."""
        ...


@dataclass(slots=True)
class _Group:
    """Held files that are merged into one."""

    first_roll: int
    """The number of the roll of the oldest file; 0 in a group of a restored checkpoint."""
    files: dict[str, Committable] = field(default_factory=dict)
    """By their drafts, from the oldest on."""
    merged: Committable | None = None

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files.values())


class Compaction:
    """The small files of one writer that wait to be merged.

    Pre-commits run in threads, one after the other and in the order of their checkpoints.
    """

    def __init__(self, target: Target, every: int | None, limit: int) -> None:
        """Begin.

        Args:
            target: the place of the files.
            every: the number of checkpoints whose files are merged; None: no file is held.
            limit: the size of a group from which on it is merged at once. Larger files are not held.
        """
        self._target = target
        self._every = every
        self._limit = limit
        self._groups: dict[str, _Group] = {}
        """By the places of the files that they become."""
        self._open: str | None = None
        """The group that takes new files."""
        self._lock = threading.Lock()
        self.released = False
        """Whether a checkpoint has got a file that is not held."""

    @property
    def waiting(self) -> bool:
        """Whether a checkpoint has to contain files that are held, or may have to."""
        return self._every is not None or bool(self._groups)

    def adopt(self, held: Sequence[Committable]) -> None:
        """Take the held files of a restored checkpoint, unless they are visible in a merged file.

        They are merged at the next checkpoint, and not with new files, which may have other columns.
        """
        with self._lock:
            for place in dict.fromkeys(file.target for file in held):
                files = {file.draft: file for file in held if file.target == place}
                if self._target.is_visible(*_ends(files)):
                    self._target.drop(list(files))
                else:
                    self._groups.setdefault(place, _Group(0)).files.update(files)

    def pre_commit(
        self, files: Sequence[EndedFile], roll: int, name: Callable[[], str], *, last: bool
    ) -> list[Committable]:
        """Make files durable, and merge the groups that are due.

        If it raises, it may be called again.

        Args:
            files: the files that have ended since the last checkpoint.
            roll: the number of the checkpoint among those of this writer, from 1 on.
            name: returns names for drafts of merged files.
            last: no record follows, so nothing is held any longer.

        Returns:
            The committables of the checkpoint, with all files that are held.
        """
        with self._lock:
            ready = [made for file in files if (made := self._hold(file, roll)) is not None]
            due = {
                place: group
                for place, group in self._groups.items()
                if last or self._is_due(group, roll)
            }
            for group in due.values():
                if group.merged is None:
                    group.merged = self._merge(group, name)
            # Nothing fails from here on: the caller gets what is taken out of the groups.
            for place, group in due.items():
                if group.merged is not None:
                    ready.append(group.merged)
                del self._groups[place]
            if self._open in due:
                self._open = None
            self.released = self.released or bool(ready)
            for group in self._groups.values():
                ready += group.files.values()
            return ready

    def _hold(self, file: EndedFile, roll: int) -> Committable | None:
        """Hold a file if it is small, and else return its committable."""
        held = None if self._every is None else file.hold(self._limit)
        if held is None:
            return file.finish()
        if self._open is None:
            self._open = held.target
            self._groups[held.target] = _Group(roll)
        group = self._groups[self._open]
        first = next(iter(group.files.values()), held)
        group.files[held.draft] = msgspec.structs.replace(
            held, target=first.target, mark=first.mark
        )
        return None

    def _is_due(self, group: _Group, roll: int) -> bool:
        if self._every is None or group.first_roll == 0:
            return True
        return roll - group.first_roll + 1 >= self._every or group.size_bytes >= self._limit

    def _merge(self, group: _Group, name: Callable[[], str]) -> Committable | None:
        """Write the content of a group into one draft.

        Returns:
            Its committable; None: another process has committed the group.

        Raises:
            CorruptError: a held file has changed.
            JobError: it is gone.
        """
        first, last = _ends(group.files)
        place = first.target if group.first_roll else name_of_restored(first.target, last.draft)
        draft: Draft | None = None
        try:
            merging: _Merging | None = None
            for file in group.files.values():
                content = self._content(file, last)
                if content is None:
                    if draft is not None:
                        draft.discard()
                    self._target.drop(list(group.files))
                    return None
                if draft is None or merging is None:
                    draft = self._target.begin_merged(name(), first, place)
                    merging = _MERGING[first.target.rpartition(".")[2]](draft)
                merging.add(content, file.header_bytes)
                draft.flush()
            assert draft is not None
            assert merging is not None
            merging.end()
            merged = draft.finish()
        except BaseException:
            if draft is not None:
                draft.discard()
            raise
        return msgspec.structs.replace(merged, merged=tuple(group.files))

    def _content(self, file: Committable, last: Committable) -> pa.Buffer | None:
        """Return the verified content of a held file; None if it was merged and is visible.

        Args:
            file: the file.
            last: the last one of its group.
        """
        content = self._target.content(file)
        if content is None:
            if self._target.is_visible(file, last):
                return None
            raise JobError(
                f"a file of the checkpoint is gone: neither held nor merged draft=`{file.draft}` "
                f"target=`{file.target}`",
                fix="bring it back from a copy, or, if the merged file was moved away, put that back for "
                f"the restart; {DROPPED_FIX}",
            )
        checksum = xxhash.xxh3_64(content).hexdigest()
        if content.size == file.size_bytes and checksum == file.checksum:
            return content
        raise CorruptError(
            f"a file that was to be merged is damaged draft=`{file.draft}` "
            f"expected_bytes=`{file.size_bytes}` bytes=`{content.size}` "
            f"expected_checksum=`{file.checksum}` checksum=`{checksum}`",
            fix="bring the draft back from a copy, and start the job again; or restore an older "
            "checkpoint (--from DIR@ID): records behind it are written again, also those that other "
            "files hold already",
        )


def _ends(files: Mapping[str, Committable]) -> tuple[Committable, Committable]:
    """Return the first and the last file of a group."""
    first, *_, last = *files.values(), *files.values()
    return first, last


class _Merging(Protocol):
    """Joins files of one format."""

    def add(self, content: pa.Buffer, header_bytes: int) -> None:
        """Add a file, which begins with a header of some bytes."""
        ...

    def end(self) -> None:
        """Write the rest of the format."""
        ...


class _MergingText:
    """Joins files of lines. They have the same header, if any."""

    def __init__(self, draft: Draft) -> None:
        self._stream = draft.stream
        self._begun = False

    def add(self, content: pa.Buffer, header_bytes: int) -> None:
        self._stream.write(content.slice(header_bytes if self._begun else 0))
        self._begun = True

    def end(self) -> None:
        return None


class _MergingParquet:
    """Joins Parquet files: their rows are written again, in larger row groups."""

    def __init__(self, draft: Draft) -> None:
        self._stream = draft.stream
        self._encoder: ParquetEncoder | None = None

    def add(self, content: pa.Buffer, header_bytes: int) -> None:
        with pq.ParquetFile(pa.BufferReader(content)) as file:
            schema = file.schema_arrow
            if self._encoder is None:
                self._encoder = ParquetEncoder(self._stream, schema)
            for batch in file.iter_batches():
                self._encoder.write(pa.RecordBatch.from_arrays(batch.columns, schema=schema))

    def end(self) -> None:
        if self._encoder is not None:
            self._encoder.close()


_MERGING: dict[str, Callable[[Draft], _Merging]] = {
    "csv": _MergingText,
    "json": _MergingText,
    "text": _MergingText,
    "parquet": _MergingParquet,
}
