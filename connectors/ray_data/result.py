"""Writes the blocks of a Ray Dataset as Parquet files into the storage of the job.

Ray computes the blocks, on as many machines as it has. They come to the process of the coordinator one
after the other, which writes them into a temporary file and then puts the file into the storage. So the
storage may be one that Ray cannot reach, and a task that Ray repeats leaves no second file.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeVar

import cloudpickle
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from ...errors import HeadgateError, SourceError, UsageError
from ...operators.functions.pickling import dump_function
from ...operators.source import SourceRun, SourceStorage
from ..files import locations
from ..files.verified import measure_parquet
from ..prepared.result import ResultKind, directory_on_the_way
from .columns import plain_block

RAY: Final = ResultKind("Ray", "a Ray dataset", "Ray computes the dataset again")
FILE_BYTES: Final = 512 << 20
"""The bytes of rows in a file, from which on another one is begun."""
_DETAIL_MAX: Final = 20_000
_METHODS: Final = ("schema", "iter_batches")
_RAISED: Final = re.compile(r"^[A-Za-z_][\w.]*: .+$", re.MULTILINE)
"""A line of a traceback that names an error."""
T = TypeVar("T")


def is_dataset(value: object) -> bool:
    """Return True if a value has the methods of a Ray Dataset that are used here."""
    named = (getattr(value, name, None) for name in _METHODS)
    return not isinstance(value, type) and all(map(callable, named))


@dataclass(frozen=True)
class RayResult:
    """Makes the result of a dataset; a `ResultMaker`.

    On the way to other processes the dataset, or the function, is pickled separately: workers carry it as
    bytes and never load it, nor its imports.

    Attributes:
        given: a dataset, or a function without arguments that returns one; None: `pickled` has it.
        name: describes it.
        split_bytes: the bytes of rows in a row group.
    """

    given: Any
    name: str
    split_bytes: int
    pickled: bytes = b""
    kind = RAY

    def __getstate__(self) -> dict[str, Any]:
        return {
            "given": None,
            "name": self.name,
            "split_bytes": self.split_bytes,
            "pickled": self.shipped,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    @cached_property
    def shipped(self) -> bytes:
        """The dataset or the function as bytes, which stay the same when it changes.

        Raises:
            UsageError: it cannot be pickled.
        """
        if self.given is None:
            return self.pickled
        try:
            return dump_function(self.given)
        except Exception as error:
            raise UsageError(
                f"the Ray dataset cannot be sent to other processes dataset=`{self.name}`: {error}",
                fix="give a function that makes it, instead of the dataset",
            ) from error

    def fingerprint(self) -> str:
        return xxhash.xxh3_64_hexdigest(self.shipped)

    def describe(self) -> str:
        return self.name

    def check(self, storage: SourceStorage, run: SourceRun) -> None:
        """Check nothing: the coordinator itself writes the files."""

    async def make(
        self, schema: pa.Schema, attempt: str, storage: SourceStorage, run: SourceRun
    ) -> dict[str, list[str]]:
        """Write the blocks of the dataset; see `ResultMaker`."""
        measured: dict[str, list[str]] = {}
        local = locations.filesystem("file", {})
        stopped = threading.Event()
        with directory_on_the_way(run) as directory:
            files = self._files(schema, directory, run, stopped)
            try:
                while (path := await _in_thread(lambda: next(files, None))) is not None:
                    measured[path.name] = await asyncio.to_thread(measure_parquet, local, str(path))
                    await storage.upload(f"{attempt}/{path.name}", path)
                    path.unlink()
            finally:
                stopped.set()
        return measured

    def _files(
        self, schema: pa.Schema, directory: Path, run: SourceRun, stopped: threading.Event
    ) -> Iterator[Path]:
        """Yield complete files, at least one. Blocking; ends at the first block after `stopped`."""
        writer = ResultWriter(directory, self.split_bytes)
        try:
            for block in _blocks(self._dataset(run), run):
                if stopped.is_set():
                    return
                yield from writer.write(plain_block(block, schema))
            yield from writer.end(schema)
        except UsageError as error:
            raise UsageError(error.message, where=run.where, fix=error.fix) from error
        finally:
            writer.close()

    def _dataset(self, run: SourceRun) -> Any:
        given = self.given
        try:
            if given is None:
                given = cloudpickle.loads(self.pickled)
            dataset = given if is_dataset(given) else given()
        except Exception as error:
            raise _failure(
                f"the Ray dataset could not be made dataset=`{self.name}`", error, run
            ) from error
        if not is_dataset(dataset):
            raise UsageError(
                f"the function must return a Ray Dataset, and returned `{type(dataset).__name__}` "
                f"function=`{self.name}`",
                fix="return what a function of ray.data returns, such as ray.data.read_parquet(...)",
            )
        return dataset


class ResultWriter:
    """Writes tables into files `part-00000.parquet`, ... of a directory."""

    def __init__(self, directory: Path, group_bytes: int, file_bytes: int = FILE_BYTES) -> None:
        self._directory = directory
        self._group_bytes = group_bytes
        self._file_bytes = file_bytes
        self._files = 0
        self._open: pq.ParquetWriter | None = None
        self._path = directory
        self._schema: pa.Schema | None = None
        self._written = 0
        self._waiting: list[pa.Table] = []
        self._waiting_bytes = 0

    def write(self, table: pa.Table) -> Iterator[Path]:
        """Write a table, or keep it until there are rows for a row group; yield files that are complete.

        The tables of a file have equal schemas.
        """
        if self._schema is not None and table.schema != self._schema:
            yield from self._complete()
        self._schema = table.schema
        # The rows of a table that is larger than a row group are dealt evenly.
        parts = max(1, round(table.nbytes / self._group_bytes))
        rows = max(1, -(-table.num_rows // parts))
        for start in range(0, table.num_rows, rows):
            part = table.slice(start, rows)
            self._waiting.append(part)
            self._waiting_bytes += part.nbytes
            if self._waiting_bytes >= self._group_bytes:
                self._flush()
            if self._written >= self._file_bytes:
                yield from self._complete()

    def end(self, schema: pa.Schema) -> Iterator[Path]:
        """Yield the last file. If there was no row it is an empty one, with columns of `schema`."""
        if not self._files and not self._waiting:
            self._waiting = [schema.empty_table()]
        yield from self._complete()

    def close(self) -> None:
        """Close the file that is open, which is not complete."""
        if self._open is not None:
            with contextlib.suppress(OSError, pa.ArrowException):
                self._open.close()

    def _flush(self) -> None:
        if not self._waiting:
            return
        group = pa.concat_tables(self._waiting)
        if self._open is None:
            self._path = self._directory / f"part-{self._files:05}.parquet"
            self._files += 1
            self._open = pq.ParquetWriter(str(self._path), group.schema, compression="zstd")
        self._open.write_table(group, row_group_size=max(1, group.num_rows))
        self._written += self._waiting_bytes
        self._waiting, self._waiting_bytes = [], 0

    def _complete(self) -> Iterator[Path]:
        self._flush()
        if self._open is None:
            return
        self._open.close()
        self._open, self._written = None, 0
        yield self._path


def _blocks(dataset: Any, run: SourceRun) -> Iterator[pa.Table]:
    """Yield the blocks of a dataset as Ray has them."""
    try:
        yield from dataset.iter_batches(batch_size=None, batch_format="pyarrow")
    except Exception as error:
        raise _failure("Ray did not compute the dataset", error, run) from error


def _failure(what: str, error: Exception, run: SourceRun) -> HeadgateError:
    if isinstance(error, HeadgateError):
        return error
    # Errors of Ray's tasks have tracebacks in their text, of which the first ends with the user's error.
    text = str(error).strip()
    found = _RAISED.search(text) if "\n" in text else None
    reason = found[0] if found else text.rpartition("\n")[2].strip()
    return SourceError(
        f"{what}: {type(error).__name__}: {reason}",
        where=run.where,
        fix="see the cause in the detail of the error; the restart strategy says whether it is tried again",
        detail="".join(traceback.format_exception(error))[-_DETAIL_MAX:],
    )


async def _in_thread(call: Callable[[], T]) -> T:
    """Call in a daemon thread, which is left behind if this is cancelled: Ray cannot be interrupted."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, problem = None, None
        try:
            result = call()
        except BaseException as error:
            problem = error
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(settle, result, problem)

    threading.Thread(target=run, name="headgate-ray-dataset", daemon=True).start()
    return await done
