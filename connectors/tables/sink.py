"""The common parts of the sinks for all table formats: arguments, settings, and commits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Generic, TypeVar

import msgspec
import pyarrow as pa

from ...errors import InternalError, PlanError, UsageError
from ...operators.sink import (
    GlobalCommit,
    Guarantee,
    IfExists,
    IfExistsLike,
    Sink,
    SinkRun,
    parse_if_exists,
)
from ...operators.sizes import parse_size
from ..arguments import check_count
from ..files.locations import check_storage_options
from .commits import TablePart, TableVersion, commit_parts
from .compaction import Compaction

ROLL_BYTES: Final = "128mb"
BUFFER: Final = "64mb"
P = TypeVar("P", bound=TablePart)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSettings:
    """The settings that the sinks for all table formats have.

    Attributes:
        partition_by: the columns whose values files are separated by.
        roll_bytes: the size at which a file ends.
        buffer_bytes: the most bytes of rows that wait in memory to be written, per subtask.
        compact_files: the number of small files of a partition from which on they are merged; None: they
            never are.
        storage_options: `s3.*` options, if they differ from the job's.
        columns: the columns of the table that the stream has.
    """

    partition_by: tuple[str, ...]
    roll_bytes: int
    buffer_bytes: int
    compact_files: int | None = None
    storage_options: dict[str, str] = field(default_factory=dict)
    columns: pa.Schema | None = None

    @property
    def schema(self) -> pa.Schema:
        """The columns, once the sink is bound to a stream."""
        if self.columns is None:
            raise InternalError("the sink is not bound")
        return self.columns

    def over(self, options: Mapping[str, str]) -> dict[str, str]:
        """Return the options of a job with those of the sink over them."""
        return {**options, **self.storage_options}


S = TypeVar("S", bound=TableSettings)


class TableSink(Sink, Generic[S]):
    """A sink that appends to one table: the coordinator commits the files of each checkpoint."""

    guarantees = frozenset({Guarantee.EXACTLY_ONCE})
    guarantee = Guarantee.EXACTLY_ONCE
    needs_columns = True
    commits_globally = True
    format: ClassVar[str]

    def __init__(self, settings: S, place: str, if_exists: IfExists) -> None:
        self.settings = settings
        self.if_exists = if_exists
        self.place = place
        self._compaction = Compaction(place)

    def check_table(self, options: Mapping[str, str]) -> bool:
        """Check that the table takes the columns of the stream; return False if there is none yet."""
        raise NotImplementedError

    def check_output(self, run: SinkRun) -> None:
        """Check the table, and that the run does not want to replace its rows."""
        if IfExists.OVERWRITE in (run.if_exists, self.if_exists):
            raise UsageError(
                f"rows of {self.format} tables are not replaced table=`{self.place}`",
                fix='if_exists="append", or delete the rows with another tool first',
            )
        self.check_table(run.options)

    def commit_files(
        self,
        commit: GlobalCommit,
        kind: type[P],
        version: Callable[[], TableVersion[P]],
        compact: Callable[[int], None],
    ) -> None:
        """Add the files of some checkpoints to the table, and merge small files if that is wanted.

        Args:
            commit: the checkpoints.
            kind: the type of their committables.
            version: returns the newest version of the table.
            compact: merges this many small files of a partition.
        """
        parts = [
            (epoch.checkpoint_id, msgspec.msgpack.decode(data, type=kind))
            for epoch in commit.epochs
            for data in epoch.committables
        ]
        commit_parts(version, self.place, commit.job, commit.sink, parts)
        files = self.settings.compact_files
        if files is not None:
            self._compaction.run(lambda: compact(files))

    def describe(self) -> str:
        return f"{self.format.lower()}({self.place})"


def check_column(schema: pa.Schema, name: str) -> pa.Field:
    """Return the column of the stream that partitions are made of.

    Raises:
        PlanError: there is none of that name.
    """
    at = schema.get_field_index(name)
    if at < 0:
        raise PlanError(
            f"no such column partition_by=`{name}`", fix=f"one of: {', '.join(schema.names)}"
        )
    return schema.field(at)


def table_arguments(
    format_: str,
    partition_by: str | Sequence[str],
    roll_bytes: str | int,
    buffer: str | int,
    compact_files: int | None,
    if_exists: IfExistsLike,
    storage_options: Mapping[str, str] | None,
) -> tuple[dict[str, Any], IfExists]:
    """Return what users give to all sinks for tables, as arguments of `TableSettings`.

    Raises:
        UsageError: an argument is wrong.
    """
    policy = parse_if_exists(if_exists)
    if policy is IfExists.OVERWRITE:
        raise UsageError(
            f"rows of {format_} tables are not replaced if_exists=`overwrite`",
            fix='if_exists="append"',
        )
    columns = (partition_by,) if isinstance(partition_by, str) else tuple(partition_by)
    if len(set(columns)) < len(columns):
        raise UsageError(f"a column is named twice partition_by=`{', '.join(columns)}`")
    sizes = {"roll_bytes": roll_bytes, "buffer": buffer}
    known = {
        name: parse_size(size, name) if isinstance(size, str) else size
        for name, size in sizes.items()
    }
    for name, size in known.items():
        check_count(name, size, 1)
    if compact_files is not None:
        check_count("compact_files", compact_files, 2)
    settings = {
        "partition_by": columns,
        "roll_bytes": known["roll_bytes"],
        "buffer_bytes": known["buffer"],
        "compact_files": compact_files,
        "storage_options": check_storage_options(storage_options),
    }
    return settings, policy
