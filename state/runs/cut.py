"""Cuts of the runs: a version as files with their description or as canonical tables, and the restore."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
import numpy as np
import pyarrow as pa

from ...errors import CorruptError, StateError, StorageError
from ..hashing import Hashes, key_group_of, key_groups_of
from ..snapshot import (
    KEY_GROUP_COLUMN,
    CollectedFiles,
    FilesCut,
    LocalFile,
    RestoredFiles,
)
from .layout import PackedRows, RowLayout
from .merge import Expired
from .run import Run, Segment
from .run_file import FilePool, MappedFile, RunFile
from .run_set import RunSet, Version

META_VERSION = 1


class SegmentMeta(msgspec.Struct, frozen=True, array_like=True):
    """Rows `start` to `stop` of the file `id`, and their first and last hash."""

    id: str
    start: int
    stop: int
    first_hash: int
    last_hash: int


class RunsMeta(msgspec.Struct, frozen=True, kw_only=True):
    """The description of the files of a cut: its runs, newest first.

    `identity` names the way in which check lanes were computed. If another one is in use, they are
    computed again.
    """

    version: int
    identity: str
    runs: list[list[SegmentMeta]]


class FilesMeta(Protocol):
    """The description of the files of a cut."""

    @property
    def version(self) -> int:
        """The version of its format."""
        ...


M = TypeVar("M", bound=FilesMeta)


def decoded_meta(data: bytes, kind: type[M], version: int, what: str) -> M:
    """Decode the description of the files of a cut; `what` they hold is named in errors.

    Raises:
        CorruptError: it is damaged.
        StateError: it has another version.
    """
    try:
        meta = msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise CorruptError(f"the list of {what} files is damaged reason=`{error}`") from error
    if meta.version != version:
        raise StateError(
            f"the list of {what} files has a format this version does not know "
            f"found=`{meta.version}` expected=`{version}`",
            fix="use the version of headgate that wrote it, or one that is newer",
        )
    return meta


def files_cut(
    runs: RunSet,
    version: Future[Version],
    *,
    identity: str,
    keys: tuple[str, ...],
    max_parallelism: int,
    chunk_bytes: int | None = None,
    expired: Expired | None = None,
) -> FilesCut:
    """Return a cut of the pinned version that a flush under way will result in.

    Its `tables` leave out what has expired.
    """

    def collect() -> CollectedFiles:
        return _collected(version.result(), identity, max_parallelism)

    def tables() -> Iterator[pa.Table]:
        return canonical_tables(runs, version.result(), max_parallelism, chunk_bytes, expired)

    def release() -> None:
        if version.exception() is None:
            version.result().unpin()

    return FilesCut(collect=collect, tables=tables, keys=keys, release=release)


def canonical_tables(
    runs: RunSet,
    version: Version,
    max_parallelism: int,
    chunk_bytes: int | None = None,
    expired: Expired | None = None,
) -> Iterator[pa.Table]:
    """Yield the rows of a pinned version in the order of key groups, which are the first column."""
    field = pa.field(KEY_GROUP_COLUMN, pa.int32(), False)
    for rows in runs.merged(version, chunk_bytes, expired):
        groups = pa.array(key_groups_of(rows.hashes, max_parallelism))
        yield runs.layout.unpack(rows).add_column(0, field, groups)


def hash_range(first_group: int, last_group: int, max_parallelism: int) -> tuple[int, int]:
    """Return the least and the greatest hash of these key groups (see `hashing.key_group_of`)."""
    first = -(-(first_group << 32) // max_parallelism) << 32
    behind = -(-((last_group + 1) << 32) // max_parallelism) << 32
    return first, behind - 1


def _collected(version: Version, identity: str, max_parallelism: int) -> CollectedFiles:
    files: dict[str, LocalFile] = {}
    described: list[list[SegmentMeta]] = []
    for run in version.runs:
        described.append([])
        for segment in run.segments:
            file = segment.file.file
            meta = SegmentMeta(file.id, segment.start, segment.stop, segment.first, segment.last)
            described[-1].append(meta)
            first = key_group_of(segment.first, max_parallelism)
            last = key_group_of(segment.last, max_parallelism)
            if (known := files.get(file.id)) is not None:
                # After a change of parallelism two slices of one file can belong to runs of different age.
                first, last = min(first, known.first_key_group), max(last, known.last_key_group)
            files[file.id] = LocalFile(file.id, file.path, len(segment.file.rows), first, last)
    together = RunsMeta(version=META_VERSION, identity=identity, runs=described)
    return CollectedFiles(list(files.values()), msgspec.msgpack.encode(together))


class RunRestorer:
    """Takes over the files of the subtasks that wrote a checkpoint.

    Args:
        directory: the directory in which files are linked.
        identity: a name for the way in which check lanes are computed now.
        range_: the first and last key group of this subtask.
    """

    def __init__(
        self,
        directory: Path,
        layout: RowLayout,
        *,
        identity: str,
        range_: tuple[int, int],
        max_parallelism: int,
        pool: FilePool | None = None,
    ) -> None:
        self._pool = pool
        self._directory, self._layout, self._identity = directory, layout, identity
        self._range, self._max_parallelism = range_, max_parallelism
        self._files: dict[str, MappedFile] = {}

    def runs(self, restored: Sequence[RestoredFiles]) -> tuple[list[Run], bool]:
        """Return the runs, newest first, and whether their check lanes are computed as in this job.

        The files of the runs are pinned once per segment.

        Raises:
            StateError: a file is missing, damaged, or does not fit.
            StorageError: the local disk failed.
        """
        by_subtask: list[list[list[Segment]]] = []
        same_identity = True
        for one in restored:
            meta = decoded_meta(one.meta, RunsMeta, META_VERSION, "run")
            same_identity &= not self._layout.wide or meta.identity == self._identity
            low, high = hash_range(
                max(one.first_key_group, self._range[0]),
                min(one.last_key_group, self._range[1]),
                self._max_parallelism,
            )
            by_subtask.append([self._segments(run, one, low, high) for run in meta.runs])
        for file in self._files.values():  # gives up files without own rows
            file.file.unpin()
        # Subtasks have no keys in common, so their runs are joined by age, to have fewer of them.
        ages = max((len(runs) for runs in by_subtask), default=0)
        together = [
            [segment for runs in by_subtask if len(runs) >= age for segment in runs[-age]]
            for age in range(ages, 0, -1)
        ]
        return [Run(sorted(run, key=lambda s: s.first)) for run in together if run], same_identity

    def _segments(
        self, run: Sequence[SegmentMeta], one: RestoredFiles, low: int, high: int
    ) -> list[Segment]:
        segments = []
        for meta in run:
            if meta.last_hash < low or meta.first_hash > high:
                continue
            file = self._open(meta.id, one)
            hashes = file.rows.hashes[meta.start : meta.stop]
            start = meta.start + int(np.searchsorted(hashes, np.uint64(low), "left"))
            stop = meta.start + int(np.searchsorted(hashes, np.uint64(high), "right"))
            if start < stop:
                file.file.pin()
                segments.append(Segment(file, start, stop))
        return segments

    def _open(self, id_: str, one: RestoredFiles) -> MappedFile:
        """Return the file in the own directory, pinned once. A file of this id that is already there is
        the same.
        """
        if id_ in self._files:
            return self._files[id_]
        if id_ not in one.files:
            raise StateError(
                f"a run file was not restored file=`{id_}`",
                fix="restore from another checkpoint or savepoint",
            )
        path = self._directory / f"{id_}.arrow"
        try:
            os.link(one.files[id_], path)
        except OSError:  # it is on another file system
            _copy(one.files[id_], path)
        file = RunFile(id_, path, self._pool)
        file.pin()
        opened = MappedFile(file, self._layout, verify=True)
        self._files[id_] = opened
        return opened


def _copy(source: Path, target: Path) -> None:
    try:
        shutil.copyfile(source, target)
    except OSError as error:
        raise StorageError(
            f"cannot take over a run file file=`{source}` reason=`{error}`",
            fix="make room, or name another disk in io.tmp.dirs",
        ) from error


def rekeyed(
    pieces: Iterator[PackedRows],
    layout: RowLayout,
    identify: Callable[[pa.Table], tuple[Hashes, Hashes | None]],
) -> Iterator[PackedRows]:
    """Yield the rows with their check lanes computed again."""
    for piece in pieces:
        table = layout.unpack(piece)
        hashes, checks = identify(table)
        order = np.argsort(hashes) if checks is None else np.lexsort((checks, hashes))
        some = None if checks is None else checks[order]
        yield layout.pack(hashes[order], some, table.take(pa.array(order)))
