"""The arguments and settings that the sinks for all table formats have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import msgspec
import pyarrow as pa

from ...errors import InternalError, PlanError, UsageError
from ...operators.sink import EpochOutput, IfExists, IfExistsLike, SinkRun, parse_if_exists
from ...operators.sizes import parse_size
from ..arguments import check_count
from ..files.locations import check_storage_options

ROLL_BYTES: Final = "128mb"
BUFFER: Final = "64mb"
P = TypeVar("P")


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


def refuse_overwrite(run: SinkRun, own: IfExists, format_: str, table: str) -> None:
    """Check that a run does not want to replace the rows of a table.

    Raises:
        UsageError: it does.
    """
    if IfExists.OVERWRITE in (run.if_exists, own):
        raise UsageError(
            f"rows of {format_} tables are not replaced table=`{table}`",
            fix='if_exists="append", or delete the rows with another tool first',
        )


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


def parts_of(epochs: Sequence[EpochOutput], kind: type[P]) -> list[tuple[int, P]]:
    """Return the committables of some checkpoints, each with the number of its checkpoint."""
    return [
        (epoch.checkpoint_id, msgspec.msgpack.decode(data, type=kind))
        for epoch in epochs
        for data in epoch.committables
    ]


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
