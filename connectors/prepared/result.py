"""A result in the storage of the job. It is made at most once per run, and never read in part.

    <run>-<fingerprint>/<attempt>/part-....parquet    what one process wrote
    <run>-<fingerprint>/result.json                   the attempt that counts: its files, sizes and rows

A `ResultMaker`, such as that of Spark, writes the files. The record has checksums of all of them, measured
when they were complete, so a file that changed before it was read is found. The record is created only if
it does not exist. So of two coordinators of a run, one of which is thought to be dead, exactly one has its
attempt read, and files that no record names belong to no result.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
import pyarrow as pa
import pyarrow.fs as pafs

from ...errors import CorruptError, StateError, StorageError
from ...operators.private_directory import own_directory
from ...operators.source import SourceRun, SourceStorage
from ...state.durable_files import sync
from ...state.sealed import Record, SealedFormat
from ..bad_records import OnBadRecord
from ..files import locations
from ..files.blocks import BlockReader, FileSplit, ParquetReader, storage_error
from ..files.source import FileSource, Reading, TextOptions, parquet_footer
from ..files.verified import measure_parquet

_RECORD: Final = "result.json"
_LOCAL_DIRS: Final = "io.tmp.dirs"


@dataclass(frozen=True, slots=True)
class ResultKind:
    """Words for what users are told about results of one kind.

    Attributes:
        maker: the name of what makes the result, such as `Spark`.
        of: what it is the result of, such as `a Spark query`.
        again: the sentence that says that it is made once more.
    """

    maker: str
    of: str
    again: str


class ResultMaker(Protocol):
    """Makes a result. It is pickled with its source."""

    @property
    def kind(self) -> ResultKind:
        """Words for messages."""
        ...

    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits that are equal for equal results."""
        ...

    def describe(self) -> str:
        """Return a short text for `explain` and for the record."""
        ...

    def check(self, storage: SourceStorage, run: SourceRun) -> None:
        """Raise UsageError if the result cannot be made there. Nothing has been made yet."""
        ...

    async def make(
        self, schema: pa.Schema, attempt: str, storage: SourceStorage, run: SourceRun
    ) -> dict[str, list[str]]:
        """Write Parquet files with at least the columns of `schema` directly below `attempt`.

        Return the checksums, by name, of those files that were on this machine.

        Raises:
            UsageError: what makes it was described wrongly.
            SourceError: it failed.
            StorageError: the storage failed.
        """
        ...


class ResultFile(Record, frozen=True, omit_defaults=True):
    """A Parquet file: its name below the directory of the result, and its rows by row group.

    `checksums` are those of the footer and of each row group. Early builds had none.
    """

    name: str
    size_bytes: int
    version: str
    rows: list[int]
    checksums: tuple[str, ...] = ()

    def checksums_of(self, group: int) -> list[str]:
        """Return the checksums that a split of one row group needs."""
        return [self.checksums[0], self.checksums[1 + group]] if self.checksums else []


class Result(Record, frozen=True):
    """The record of a result; `query` describes what made it, for people who look into it."""

    query: str
    files: list[ResultFile]

    @property
    def rows(self) -> int:
        """The number of rows of the result."""
        return sum(sum(file.rows) for file in self.files)

    def splits(self, address: str) -> list[bytes]:
        """Return one split per row group that has rows. The result is in the directory `address`."""
        directory = locations.parse_location(address).path
        return [
            msgspec.msgpack.encode(
                FileSplit(
                    f"{directory}/{file.name}",
                    file.size_bytes,
                    file.version,
                    0,
                    end=rows,
                    row_group=index,
                    checksums=file.checksums_of(index),
                )
            )
            for file in self.files
            for index, rows in enumerate(file.rows)
            if rows
        ]


_FORMAT: Final = SealedFormat[Result]("record of the result of a source", Result)


class ResultFiles(FileSource):
    """The Parquet source of the files of a result, whose splits contain their paths."""

    def __init__(
        self,
        schema: pa.Schema,
        on_bad_record: OnBadRecord,
        batch_rows: int,
        row_type: type[Any] | None,
        kind: ResultKind,
    ) -> None:
        self.kind = kind
        super().__init__(
            path="",
            format="parquet",
            schema=schema,
            row_type=row_type,
            reading=Reading(on_bad_record, batch_rows, split_bytes=0, text=TextOptions()),
            storage_options={},
            discover_every_ms=None,
        )

    def open_split(self, split: FileSplit, options: Mapping[str, str]) -> BlockReader:
        """See the base class.

        Raises:
            CorruptError: the file has changed since it was written.
            StateError: the result no longer exists.
        """
        # The scheme does not come from the job's present storage: a restored split names the one it was
        # made in.
        scheme = "file" if split.path.startswith("/") else "s3"
        store = locations.filesystem(scheme, options)
        try:
            return ParquetReader(store, split, self.schema, self.reading.batch_rows)
        except CorruptError as error:
            raise CorruptError(
                f"the result of {self.kind.of} is damaged: {error.message}",
                fix="bring the file back from a copy, or start the job fresh (--fresh): then "
                f"{self.kind.again}",
            ) from error
        except StateError as error:
            raise StateError(
                f"the result of {self.kind.of} is not there as it was: {error.message}",
                fix=f"put it back, or start the job fresh (--fresh): then {self.kind.again}",
            ) from error


async def find_or_make(maker: ResultMaker, schema: pa.Schema, run: SourceRun) -> tuple[Result, str]:
    """Find or make the result in this run, and return it with the name of its directory.

    Args:
        schema: the schema of the wanted columns of the result.

    Raises:
        UsageError: the maker, or the place where it works, is wrong.
        SourceError: the maker failed.
        StorageError: the storage failed.
    """
    storage = run.storage
    assert storage is not None  # the source declares that it needs one
    maker.check(storage, run)
    by = maker.kind.maker
    name = f"{run.run}-{maker.fingerprint()}"
    found = await storage.read(f"{name}/{_RECORD}")
    if found is not None:
        result = _FORMAT.decode(found, f"{name}/{_RECORD}", storage.address)
        if await asyncio.to_thread(_all_there, result, f"{storage.address}/{name}", run.options):
            run.announce(f"takes the result that {by} made before ({result.rows:,} rows)")
            return result, name
        run.announce(f"the result that {by} made before is gone: {maker.kind.again}")
        await storage.delete([f"{name}/{_RECORD}"])
    attempt = f"{name}/{secrets.token_hex(8)}"
    try:
        measured = await maker.make(schema, attempt, storage, run)
        made = await asyncio.to_thread(
            describe_result, maker.describe(), storage.address, attempt, run.options, measured
        )
    except BaseException:
        with contextlib.suppress(StorageError):  # the first error counts
            await _delete_below(storage, f"{attempt}/")
        raise
    ours = _FORMAT.encode(made)
    record = await storage.create_if_absent(f"{name}/{_RECORD}", ours)
    if record != ours:
        await _delete_below(storage, f"{attempt}/")
    result = _FORMAT.decode(record, f"{name}/{_RECORD}", storage.address)
    run.announce(f"{by} is done: {result.rows:,} rows in {len(result.files):,} files")
    return result, name


async def delete_results(run: SourceRun, keep: str = "") -> None:
    """Delete all results except that in the directory `keep`, and all partly written ones.

    Raises:
        FencedError: a newer coordinator owns the job; nothing was deleted.
        StorageError: the storage failed.
    """
    storage = run.storage
    if storage is None:
        return
    doomed = [name for name in await storage.names("") if not keep or not name.startswith(keep)]
    if doomed and run.confirm is not None:
        # This comes after the listing, so that no file of a newer run of the job is in the list.
        await run.confirm()
    # Records go first, so that their files exist as long as they do.
    doomed.sort(key=lambda name: not name.endswith(f"/{_RECORD}"))
    await storage.delete(doomed)


async def _delete_below(storage: SourceStorage, prefix: str) -> None:
    await storage.delete(await storage.names(prefix))


def local_directory(run: SourceRun) -> str | None:
    """Return the first directory for temporary files; None: that of the system."""
    named = (part.strip() for part in run.options.get(_LOCAL_DIRS, "").split(","))
    return next(filter(None, named), None)


@contextlib.contextmanager
def directory_on_the_way(run: SourceRun) -> Iterator[Path]:
    """A directory of this machine for files that go to the storage from there. Blocking.

    If this process is killed, the next coordinator that makes a result on this machine deletes it.

    Raises:
        OSError: it cannot be made.
    """
    above = Path(local_directory(run) or tempfile.gettempdir())
    above.mkdir(parents=True, exist_ok=True)
    with own_directory(above, "headgate-result-") as directory:
        yield directory


def describe_result(
    query: str,
    address: str,
    attempt: str,
    options: Mapping[str, str],
    measured: Mapping[str, list[str]],
) -> Result:
    """Return the record of the files that were written below `attempt`. Blocking.

    Files whose checksums are not in `measured` yet are read completely.
    """
    options = locations.of_storage(options)
    place = locations.parse_location(f"{address}/{attempt}")
    store = locations.filesystem(place.scheme, options)
    found = locations.find_files(str(place), options)

    def look_at(path: str) -> tuple[list[int], list[str]]:
        _, rows = parquet_footer(store, path)
        return rows, measured.get(Path(path).name) or _measured(store, path)

    with ThreadPoolExecutor(locations.REQUESTS_MAX, "headgate-footers") as threads:
        looked = list(threads.map(lambda file: look_at(file.path), found))
    if place.scheme == "file":
        # Those who write files leave that to the system, and the record must not reach the disk earlier.
        for path in [*(file.path for file in found), place.path]:
            sync(path)
    directory = attempt.rpartition("/")[2]
    return Result(
        query,
        [
            ResultFile(
                f"{directory}/{Path(file.path).name}",
                file.size_bytes,
                file.version,
                rows,
                tuple(checksums),
            )
            for file, (rows, checksums) in zip(found, looked, strict=True)
        ],
    )


def _measured(store: pafs.FileSystem, path: str) -> list[str]:
    try:
        return measure_parquet(store, path)
    except (OSError, pa.ArrowException) as error:
        raise storage_error(path, error) from error


def _all_there(result: Result, address: str, options: Mapping[str, str]) -> bool:
    """Return True if every file below `address` exists with its size. Blocking.

    Raises:
        StorageError: the storage cannot be asked.
    """
    place = locations.parse_location(address)
    store = locations.filesystem(place.scheme, locations.of_storage(options))
    try:
        infos = store.get_file_info([f"{place.path}/{file.name}" for file in result.files])
    except (OSError, pa.ArrowException) as error:
        raise storage_error(address, error) from error
    return all(
        info.type == pafs.FileType.File and info.size == file.size_bytes
        for info, file in zip(infos, result.files, strict=True)
    )
