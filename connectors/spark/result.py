"""The result of a query in the storage of the job. It is made at most once per run, and never read in part.

    <run>-<fingerprint>/<attempt>/part-....parquet    what one process of Spark wrote
    <run>-<fingerprint>/result.json                   the attempt that counts: its files, sizes and rows

The record has checksums of all files, measured when Spark was done, so a file that changed before it was
read is found. The record is created only if it does not exist. So of two coordinators of a run, one of
which is thought to be dead, exactly one has its attempt read, and files that no record names belong to no
result.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.fs as pafs

from ...errors import CorruptError, StateError, StorageError, UsageError
from ...operators.source import SourceRun, SourceStorage
from ...state.sealed import Record, SealedFormat
from ..bad_records import OnBadRecord
from ..files import locations
from ..files.blocks import BlockReader, FileSplit, ParquetReader, storage_error
from ..files.source import FileSource, TextOptions, parquet_footer
from ..files.verified import measure_parquet
from .process import SparkProcess
from .task import SparkQuery, Task

_RECORD: Final = "result.json"
_LOCAL_DIRS: Final = "io.tmp.dirs"


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
    """The record of a result; `query` is for people who look into it."""

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


_FORMAT: Final = SealedFormat[Result]("record of the result of a Spark query", Result)


class ResultFiles(FileSource):
    """The Parquet source of the files of a result, whose splits contain their paths."""

    def __init__(
        self,
        schema: pa.Schema,
        on_bad_record: OnBadRecord,
        batch_rows: int,
        row_type: type[Any] | None,
    ) -> None:
        super().__init__(
            path="",
            format="parquet",
            schema=schema,
            file_columns=schema.names,
            on_bad_record=on_bad_record,
            batch_rows=batch_rows,
            split_bytes=0,
            text=TextOptions(),
            storage_options={},
            row_type=row_type,
        )

    def open_split(self, split: FileSplit, options: Mapping[str, str]) -> BlockReader:
        """See the base class.

        Raises:
            CorruptError: the file has changed since Spark wrote it.
            StateError: the result no longer exists.
        """
        # The scheme does not come from the job's present storage: a restored split names the one it was
        # made in.
        scheme = "file" if split.path.startswith("/") else "s3"
        store = locations.filesystem(scheme, options)
        try:
            return ParquetReader(store, split, self.schema, self.batch_rows)
        except CorruptError as error:
            raise CorruptError(
                f"the result of a Spark query is damaged: {error.message}",
                fix="bring the file back from a copy, or start the job fresh (--fresh): then the query "
                "runs again",
            ) from error
        except StateError as error:
            raise StateError(
                f"the result of a Spark query is not there as it was: {error.message}",
                fix="put it back, or start the job fresh (--fresh): then the query runs again",
            ) from error


async def find_or_make(query: SparkQuery, schema: pa.Schema, run: SourceRun) -> tuple[Result, str]:
    """Find or make the result of a query in this run, and return it with the name of its directory.

    Args:
        schema: the schema of the wanted columns of the result.

    Raises:
        UsageError: the query or the place where it runs is wrong; nothing was run.
        SourceError: Spark failed.
        StorageError: the storage failed.
    """
    storage = run.storage
    assert storage is not None  # the source declares that it needs one
    _check_reachable(query, storage, run)
    plan = query.shipped()
    name = f"{run.run}-{plan.fingerprint()}"
    found = await storage.read(f"{name}/{_RECORD}")
    if found is not None:
        result = _FORMAT.decode(found, f"{name}/{_RECORD}", storage.address)
        if await asyncio.to_thread(_all_there, result, f"{storage.address}/{name}", run.options):
            run.announce(f"takes the result that Spark made before ({result.rows:,} rows)")
            return result, name
        run.announce("the result that Spark made before is gone: the query runs again")
        await storage.delete([f"{name}/{_RECORD}"])
    attempt = f"{name}/{secrets.token_hex(8)}"
    try:
        task = Task(plan, f"headgate-{run.job}-{run.source}", schema.serialize().to_pybytes())
        measured = await _make(query, task, attempt, storage, run)
        made = await asyncio.to_thread(
            describe_result, query.describe(), storage.address, attempt, run.options, measured
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
    run.announce(f"Spark is done: {result.rows:,} rows in {len(result.files):,} files")
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
        await (
            run.confirm()
        )  # after listing, so that no file of a newer run of the job is in the list
    # Records go first, so that their files exist as long as they do.
    doomed.sort(key=lambda name: not name.endswith(f"/{_RECORD}"))
    await storage.delete(doomed)


async def _delete_below(storage: SourceStorage, prefix: str) -> None:
    await storage.delete(await storage.names(prefix))


def _check_reachable(query: SparkQuery, storage: SourceStorage, run: SourceRun) -> None:
    if query.runs_here or locations.parse_location(storage.address).scheme != "file":
        return
    raise UsageError(
        f"Spark elsewhere cannot write into a directory of this machine "
        f"master=`{query.plan.master}` storage=`{storage.address}`",
        where=run.where,
        fix="keep the job's checkpoints on S3, which both reach, or run Spark here: "
        'master="local[*]"',
    )


async def _make(
    query: SparkQuery, task: Task, attempt: str, storage: SourceStorage, run: SourceRun
) -> dict[str, list[str]]:
    """Let Spark write the result below `attempt`; return the checksums, by name, of files that were on
    this machine.
    """
    measured: dict[str, list[str]] = {}
    location = locations.parse_location(f"{storage.address}/{attempt}")
    if location.scheme == "file":
        await _run(task, f"file://{location.path}", run)
    elif not query.runs_here:
        await _run(task, f"s3a://{location.path}", run)
    else:
        # Spark would need Hadoop's client of S3 for it, which pyspark does not bring.
        above = _local(run)
        if above is not None:
            os.makedirs(above, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="headgate-result-", dir=above) as directory:
            await _run(task, f"file://{directory}/result", run)
            local = locations.filesystem("file", {})
            for path in sorted(Path(directory, "result").glob("*.parquet")):
                measured[path.name] = await asyncio.to_thread(measure_parquet, local, str(path))
                await storage.upload(f"{attempt}/{path.name}", path)
    return measured


async def _run(task: Task, target: str, run: SourceRun) -> None:
    """Run the task in a process. A cancelled call leaves neither the process nor Java behind."""
    loop = asyncio.get_running_loop()

    def announce(text: str) -> None:
        loop.call_soon_threadsafe(run.announce, text)

    task = msgspec.structs.replace(task, target=target)
    process = SparkProcess(task, _local(run) or "", run.where, announce)
    # This does not use the loop's own threads, as the thread is busy for as long as the query runs.
    with ThreadPoolExecutor(1, "headgate-spark") as thread:
        running = loop.run_in_executor(thread, process.run)
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            process.kill()
            await asyncio.wait([running])
            running.exception()  # looks at the error, so that asyncio does not report it
            raise


def _local(run: SourceRun) -> str | None:
    """Return the first directory for temporary files; None: that of the system."""
    named = (part.strip() for part in run.options.get(_LOCAL_DIRS, "").split(","))
    return next(filter(None, named), None)


def describe_result(
    query: str,
    address: str,
    attempt: str,
    options: Mapping[str, str],
    measured: Mapping[str, list[str]],
) -> Result:
    """Return the record of the files that Spark has written below `attempt`. Blocking.

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
        for path in [*(file.path for file in found), place.path]:
            _sync(path)
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


def _sync(path: str) -> None:
    """Sync a file: Spark leaves the writing of files to the system, and the record must not reach the
    disk earlier.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
