"""Writes CSV, JSON lines and Parquet files, each record exactly once.

A file is *in progress* while it is written, *pending* once it is finished at a barrier, and *committed*,
that is visible, once the checkpoint is complete. File names sort by age and name the writer:

    part-<sink>-<attempt>-<after>-<subtask>-<number>.parquet

`<sink>` is a short hash of job and sink name; `<after>` is the id of the last checkpoint seen when the file
was begun: the file holds only records behind that barrier. So after a restore of checkpoint R, drafts of
older attempts with `after` >= R belong to no checkpoint that counts and are deleted; no others are.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, Final, Required, TypedDict, Unpack

import msgspec
import pyarrow as pa
import xxhash

from ...errors import InternalError, PlanError, UsageError
from ...operators.base import OperatorContext
from ...operators.durations import Duration, parse_duration
from ...operators.elements import Batch, ColumnBatch
from ...operators.signatures import passes_on
from ...operators.sink import (
    DISCARDED_COUNTER,
    Guarantee,
    GuaranteeLike,
    IfExists,
    IfExistsLike,
    OutputFile,
    Sink,
    SinkRun,
    SinkWriter,
    parse_guarantee,
    parse_if_exists,
    stream_columns,
)
from ...operators.sizes import parse_size
from ...state.snapshot import CommitPermit
from ..arguments import check_choice, check_count
from ..staging import is_dead
from .compaction import Compaction
from .drafts import Committable, Draft, LocalTarget, Target
from .formats import ENCODERS, Encoder, FileFormat, can_encode
from .locations import (
    PathLike,
    address_of,
    check_directory,
    check_storage_options,
    parse_location,
)
from .s3_drafts import S3Target

ROLL_BYTES: Final = "128mb"
_NAME = re.compile(
    r"part-(?P<tag>[0-9a-f]{8})-(?P<attempt>\d+)-(?P<after>\d+)-(?P<subtask>\d+)-(?P<number>\d+)(-\d+)?\.\w+"
)


@dataclass(frozen=True, slots=True)
class PartName:
    """The parts of the name of a file."""

    tag: str
    attempt: int
    after: int
    subtask: int
    number: int

    def __str__(self) -> str:
        written = prefix_of(self.tag, self.attempt)
        return f"{written}{self.after:09}-{self.subtask:05}-{self.number:06}"

    @classmethod
    def parse(cls, name: str) -> PartName | None:
        """Return the parts of a name; None if the name is not one of ours."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        tag, *numbers, _ = match.groups()
        return cls(tag, *map(int, numbers))


def tag_of(job: str, sink: str) -> str:
    """Return the short hash that marks the files of one sink of one job."""
    return f"{xxhash.xxh32_intdigest(f'{job}/{sink}'.encode()):08x}"


def prefix_of(tag: str, attempt: int | None = None) -> str:
    """Return the prefix of the names of all files of one sink, or of one of its attempts."""
    return f"part-{tag}-" if attempt is None else f"part-{tag}-{attempt:010}-"


class FileSizes(msgspec.Struct, frozen=True):
    """When files end, and which of them are merged.

    Attributes:
        roll_every_ms: the greatest age of a file that is still written; None: a checkpoint only.
        roll_bytes: the size at which a file ends.
        compact_every: the number of checkpoints whose small files are merged; None: none are.
        compact_bytes: the size from which on files are merged at once, or are not small.
    """

    roll_every_ms: int | None
    roll_bytes: int
    compact_every: int | None
    compact_bytes: int


class FileSink(Sink):
    """Files of one format in one directory."""

    guarantees = frozenset(Guarantee)
    needs_columns = True

    def __init__(
        self,
        path: str,
        format: str,
        guarantee: Guarantee,
        sizes: FileSizes,
        storage_options: Mapping[str, str],
        if_exists: IfExists,
    ) -> None:
        self.path = path
        self.format = format
        self.guarantee = guarantee
        self.sizes = sizes
        self.storage_options = dict(storage_options)
        self.if_exists = if_exists
        self.location = parse_location(path)
        self.place = str(self.location)
        self.extras = ("s3",) if self.location.scheme == "s3" else ()

    def bind(self, schema: pa.Schema | None) -> None:
        schema = stream_columns(schema, f"{self.format} files")
        if self.format == "text" and len(schema) != 1:
            raise PlanError(
                f"lines are made of one column columns=`{', '.join(schema.names)}`",
                fix="select the column before, or write json",
            )
        for column in schema:
            if not can_encode(self.format, column.type):
                raise PlanError(
                    f"{self.format} has no form for this type column=`{column.name}` "
                    f"type=`{column.type}`",
                    fix="select the column out, cast it, or write parquet",
                )

    def writer(self) -> SinkWriter:
        return FileWriter(self)

    def describe(self) -> str:
        return f"{self.format}({self.path})"

    def target(
        self,
        job: str,
        sink: str,
        options: Mapping[str, str],
        run_in_thread: Callable[[Callable[[], Any]], Any],
    ) -> Target:
        """Return the place for the files of one job."""
        if self.location.scheme == "s3":
            options = {**options, **self.storage_options}
            return S3Target(self.location, job, sink, options, run_in_thread)
        direct = self.guarantee is Guarantee.NONE
        return LocalTarget(self.location.path, job, sink, direct)

    def check_output(self, run: SinkRun) -> None:
        if self.location.scheme == "file" and os.path.isfile(self.location.path):
            raise UsageError(
                f"sink `{run.sink}` writes into a directory, and there is a file of that name "
                f"path=`{self.location.path}`",
                fix="give the path of a directory; it is made if it does not exist",
            )

    def check_connection(self, options: Mapping[str, str]) -> str:
        return check_directory(self.path, {**options, **self.storage_options})

    def list_output(self, run: SinkRun) -> list[OutputFile]:
        found = self._target_of(run).visible(prefix_of(tag_of(run.job, run.sink)))
        return [file for file in found if PartName.parse(file.name) is not None]

    def delete_output(self, run: SinkRun, files: list[OutputFile]) -> int:
        return self._target_of(run).delete(files)

    def _target_of(self, run: SinkRun) -> Target:
        # Listing and deleting happen in the calling thread.
        return self.target(run.job, run.sink, run.options, lambda call: call())


class _File:
    """A file from its first record until it is finished."""

    def __init__(self, draft: Draft, format: str, schema: pa.Schema) -> None:
        self.draft = draft
        self._schema = schema
        self._encoder: Encoder = ENCODERS[format](draft.stream, schema)
        self._header_bytes = draft.stream.tell()
        self._lock = threading.Lock()
        self._encoded_bytes: int | None = None
        """The size of the file, once the end of the format is written."""
        self._broken: Exception | None = None
        self._committable: Committable | None = None
        self._held: Committable | None = None

    def write(self, batch: pa.RecordBatch) -> None:
        if batch.schema != self._schema:  # nullability and metadata may differ from batch to batch
            batch = pa.RecordBatch.from_arrays(batch.columns, schema=self._schema)
        self._encoder.write(batch)

    @property
    def size_bytes(self) -> int:
        return self.draft.stream.tell() + self._encoder.buffered_bytes

    def encode_rest(self) -> None:
        """Write the end of the format, such as the footer. If that failed once, it fails each time."""
        if self._broken is not None:
            raise self._broken
        if self._encoded_bytes is None:
            try:
                self._encoder.close()
            except Exception as error:
                self._broken = error
                raise
            # A draft whose end has failed has a closed stream.
            self._encoded_bytes = self.draft.stream.tell()

    def finish(self) -> Committable:
        """Make the file durable; blocks. It may be repeated, also from several threads."""
        with self._lock:
            if self._committable is None:
                self.encode_rest()
                self._committable = self.draft.finish()
            return self._committable

    def hold(self, limit: int) -> Committable | None:
        """Make the file durable where it can be read again, to be merged with others; blocks.

        It may be repeated, also from several threads.

        Args:
            limit: the size from which on it is no small file.

        Returns:
            None if it is not small, or if it was finished before.
        """
        with self._lock:
            if self._held is None and self._committable is None:
                self.encode_rest()
                assert self._encoded_bytes is not None
                if self._encoded_bytes < limit and (held := self.draft.hold()) is not None:
                    self._held = msgspec.structs.replace(held, header_bytes=self._header_bytes)
            return self._held

    def discard(self) -> None:
        """Give up the file. Does not raise."""
        self.draft.discard()  # first, so that further writes of the encoder have no effect
        with suppress(Exception):
            self._encoder.close()  # otherwise it would try to write when it is garbage collected
        with suppress(Exception):
            self.draft.stream.close()


class FileWriter(SinkWriter):
    """Writes the files of one subtask, one after the other."""

    def __init__(self, sink: FileSink) -> None:
        self._sink = sink
        self._staged = sink.guarantee is Guarantee.EXACTLY_ONCE
        self._file: _File | None = None
        self._closed: list[_File] = []
        """The files that have ended since the last roll and, without exactly-once, are not yet visible."""
        self._committing = threading.Lock()
        self._failure: BaseException | None = None
        self._cancel_timer: Callable[[], None] | None = None
        self._schema: pa.Schema | None = None
        self._rolls = 0
        self._last = False

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._tag = tag_of(context.job_name, context.operator_name)
        self._after = context.restored_checkpoint
        self._target = self._sink.target(
            context.job_name, context.operator_name, context.options, context.run_in_thread
        )
        sink = self._sink
        self._compaction = Compaction(
            self._target, sink.sizes.compact_every, sink.sizes.compact_bytes
        )

    def prepare(self) -> None:
        self._target.prepare()
        self._delete_dead_drafts()
        self._numbers = count(self._first_free_number())

    def write(self, batch: Batch) -> None:
        if self._failure is not None:
            raise self._failure
        if not isinstance(batch, ColumnBatch):
            raise InternalError("a file sink got a batch of objects, which the plan rules out")
        if not len(batch):
            return
        if self._file is None:
            self._file = self._begin(batch.data.schema)
        self._file.write(batch.data)
        if self._file.size_bytes >= self._sink.sizes.roll_bytes:
            self._end_file()

    def roll(self, checkpoint_id: int) -> Callable[[], list[bytes]] | None:
        before, self._after = self._after, checkpoint_id
        self._rolls += 1
        files = self._take_ended()
        if not files and not self._compaction.waiting:
            return None
        roll, last = self._rolls, self._last

        def pre_commit() -> list[bytes]:
            if not self._staged:
                self._show(files)
            ended = files if self._staged else []
            # A merged draft is new since the last checkpoint, as all others that this one gets.
            made = self._compaction.pre_commit(ended, roll, lambda: self._name(before), last=last)
            return [msgspec.msgpack.encode(committable) for committable in made]

        return pre_commit

    def commit(self, committables: list[bytes], permit: CommitPermit) -> None:
        decoded = [msgspec.msgpack.decode(item, type=Committable) for item in committables]
        ready = [committable for committable in decoded if not committable.held]
        self._target.commit(ready)
        for committable in ready:
            self._target.drop(committable.merged)
        if not self._rolls:  # the files are those of the restored checkpoint
            merged = {draft for committable in ready for draft in committable.merged}
            held = [each for each in decoded if each.held and each.draft not in merged]
            self._compaction.adopt(held)

    def shows_output(self) -> bool:
        return self._sink.sizes.compact_every is None or self._last or self._compaction.released

    def finish(self) -> Callable[[], None] | None:
        if self._failure is not None:
            raise self._failure
        if self._staged:
            self._last = True
            return None
        # These guarantees do not wait for a checkpoint, and none has to follow.
        files = self._take_ended()

        return lambda: self._show(files)

    def close(self) -> None:
        self._stop_timer()
        dropped = [*self._closed, *([self._file] if self._file is not None else [])]
        self._file, self._closed = None, []
        for file in dropped:
            file.discard()

    def _begin(self, schema: pa.Schema) -> _File:
        if self._schema is None:
            self._schema = schema.remove_metadata()
        draft = self._target.begin(self._name(self._after))
        if self._sink.sizes.roll_every_ms is not None:
            self._cancel_timer = self.context.timers.call_later(
                self._sink.sizes.roll_every_ms, self._end_file
            )
        return _File(draft, self._sink.format, self._schema)

    def _name(self, after: int) -> str:
        """Return a new name for a file that was begun after a checkpoint. Also called by threads."""
        context = self.context
        number = next(self._numbers)
        name = PartName(self._tag, context.attempt, after, context.subtask_index, number)
        return f"{name}.{self._sink.format}"

    def _end_file(self) -> None:
        """End the file between two barriers, because of its size or age."""
        file, self._file = self._file, None
        self._stop_timer()
        if file is None:
            return
        self._closed.append(file)
        file.encode_rest()
        if not self._staged:
            future = self.context.run_in_thread(lambda: self._show([file]))
            future.add_done_callback(lambda done: self._settle(file, done))

    def _take_ended(self) -> list[_File]:
        """End the open file, and take all files that have ended since the last time; a thread does the
        rest.
        """
        if self._file is not None:
            self._closed.append(self._file)
            self._stop_timer()
            self._file = None
        files, self._closed = self._closed, []
        return files

    def _show(self, files: list[_File]) -> None:
        """Make files visible, without exactly-once. Runs in a thread, and may be repeated."""
        committables = [file.finish() for file in files]
        with self._committing:  # a file that ended early may be committed by two threads
            self._target.commit(committables)

    def _settle(self, file: _File, done: Any) -> None:
        """Note that a file that ended early is visible, so that nothing is left to do at the barrier, or
        that it failed.
        """
        if done.cancelled():
            return
        if done.exception() is not None:
            self._failure = done.exception()
        elif file in self._closed:  # otherwise a roll or `finish` has taken it
            self._closed.remove(file)

    def _stop_timer(self) -> None:
        if self._cancel_timer is not None:
            self._cancel_timer()
            self._cancel_timer = None

    def _delete_dead_drafts(self) -> None:
        """Discard the drafts of older attempts that no checkpoint can name (see the module docstring)."""
        context = self.context
        discarded = context.metrics.counter(DISCARDED_COUNTER)
        for name, discard in self._target.drafts(prefix_of(self._tag)):
            part = PartName.parse(name)
            if part is not None and is_dead(context, part.attempt, part.after, part.subtask):
                discard()
                discarded.inc()

    def _first_free_number(self) -> int:
        """Return a number above those of this attempt's files, which exist if the job's storage was
        wiped.
        """
        context = self.context
        parts = map(PartName.parse, self._target.names(prefix_of(self._tag, context.attempt)))
        numbers = [
            part.number
            for part in parts
            if part is not None and part.subtask == context.subtask_index
        ]
        return max(numbers, default=-1) + 1


class FileSinkOptions(TypedDict, total=False):
    """The keyword arguments of all sinks of files, which `files_sink` documents."""

    guarantee: Required[GuaranteeLike]
    roll_every: Duration | None
    roll_bytes: str | int
    storage_options: Mapping[str, str] | None
    if_exists: IfExistsLike
    compact_every: int | None
    compact_bytes: str | int | None


def files_sink(
    path: PathLike,
    *,
    format: FileFormat,
    guarantee: GuaranteeLike,
    roll_every: Duration | None = None,
    roll_bytes: str | int = ROLL_BYTES,
    storage_options: Mapping[str, str] | None = None,
    if_exists: IfExistsLike = "error",
    compact_every: int | None = None,
    compact_bytes: str | int | None = None,
) -> FileSink:
    """Return a sink that writes files into a directory, local or s3://bucket/prefix.

    Readers that ignore names beginning with a dot see only committed files. A file ends at each
    checkpoint, and before that if it gets too old or too large.

    Args:
        path: the directory.
        format: `csv` (with a header), `json` (one object per line), `parquet`, or `text` (a line for each
            record, which has one column of text).
        guarantee: `exactly_once`: files appear when their checkpoint is complete. `at_least_once`: they
            appear as soon as they end, and again after a failure. `none`: local files are visible while
            they are written.
        roll_every: the greatest age of a file that is still written.
        roll_bytes: the size at which a file ends.
        storage_options: `s3.endpoint` and `s3.region`, if they differ from the job's.
        if_exists: what happens when a run starts without state, and the directory has files of earlier
            runs of the same job and sink. `error`: the run is refused, since its records would be there
            twice. `append`: the files stay, and the run writes beside them. `overwrite`: they are
            deleted as soon as the run has committed files of its own. A run that resumes from a
            checkpoint or savepoint goes on beside its files.
        compact_every: the number of checkpoints whose small files are merged before they become visible;
            with `exactly_once`. None: each file becomes visible with its checkpoint.
        compact_bytes: the size from which on files are merged at once, or are not small; `roll_bytes` if
            it is absent.

    Raises:
        UsageError: an argument is wrong.
    """
    check_choice("format", format, tuple(ENCODERS), "file format", "formats")
    promised = parse_guarantee(guarantee)
    if compact_every is not None:
        check_count("compact_every", compact_every, 2)
        if promised is not Guarantee.EXACTLY_ONCE:
            raise UsageError(
                f"files that become visible at once are not merged guarantee=`{promised.value}`",
                fix='guarantee="exactly_once", or leave compact_every out',
            )
    elif compact_bytes is not None:
        raise UsageError(
            "compact_bytes has a meaning only with compact_every", fix="such as compact_every=10"
        )
    age_ms = None if roll_every is None else parse_duration(roll_every, "roll_every")
    rolled = roll_bytes if isinstance(roll_bytes, int) else parse_size(roll_bytes, "roll_bytes")
    options, exists = check_storage_options(storage_options), parse_if_exists(if_exists)
    if compact_bytes is None:
        compact_bytes = rolled
    elif isinstance(compact_bytes, str):
        compact_bytes = parse_size(compact_bytes, "compact_bytes")
    sizes = FileSizes(age_ms, rolled, compact_every, compact_bytes)
    return FileSink(address_of(path), format, promised, sizes, options, exists)


@passes_on(FileSinkOptions, files_sink)
def parquet_sink(path: PathLike, **options: Unpack[FileSinkOptions]) -> FileSink:
    """`files_sink` for Parquet."""
    return files_sink(path, format="parquet", **options)


@passes_on(FileSinkOptions, files_sink)
def csv_sink(path: PathLike, **options: Unpack[FileSinkOptions]) -> FileSink:
    """`files_sink` for CSV."""
    return files_sink(path, format="csv", **options)


@passes_on(FileSinkOptions, files_sink)
def json_sink(path: PathLike, **options: Unpack[FileSinkOptions]) -> FileSink:
    """`files_sink` for JSON lines."""
    return files_sink(path, format="json", **options)
