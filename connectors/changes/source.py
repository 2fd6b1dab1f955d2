"""A source of the changes of one table: its arguments, its fields in a manifest, and its columns."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Generic, Literal, Self, TypeAlias, TypeVar

import pyarrow as pa

from ...api.manifest.fields import ChoiceKind, Field, TextKind, size
from ...errors import UsageError
from ...operators.source import Source
from ...operators.suggestions import suggest
from ..arguments import ON_LOST, check_choice, check_count
from ..manifest_fields import metadata_field

Snapshot: TypeAlias = Literal["initial", "never"]
NewColumns: TypeAlias = Literal["fail", "ignore"]
BUFFER: Final = "32mb"
_SNAPSHOTS: Final[tuple[Snapshot, ...]] = ("initial", "never")
_NEW_COLUMNS: Final[tuple[NewColumns, ...]] = ("fail", "ignore")

S = TypeVar("S", bound="ChangeSettings")


@dataclass(frozen=True, kw_only=True)
class ChangeSettings:
    """The arguments of a source of changes, whose function documents them."""

    table: str
    snapshot: str
    op: str
    before: str | None
    metadata: Mapping[str, str]
    stop: str | None
    on_lost: str
    new_columns: str
    batch_rows: int
    buffer_bytes: int

    @property
    def bounded(self) -> bool:
        """True if reading ends."""
        return self.stop is not None

    def check_choices(self, kinds: Mapping[str, pa.DataType]) -> None:
        """Check the arguments, without a look at the database.

        Args:
            kinds: the metadata that there is.

        Raises:
            UsageError: one is wrong.
        """
        check_choice("snapshot", self.snapshot, _SNAPSHOTS)
        check_choice("on_lost", self.on_lost, ON_LOST)
        check_choice("new_columns", self.new_columns, _NEW_COLUMNS)
        check_choice("stop", self.stop or "latest", ("latest",))
        for kind in self.metadata:
            if kind not in kinds:
                raise UsageError(
                    f"changes have no such metadata metadata=`{kind}`",
                    fix=suggest(kind, list(kinds), "metadata"),
                )
        check_count("batch_rows", self.batch_rows, 1)


class ChangeSource(Source[Any], Generic[S]):
    """The changes of one table, each read exactly once.

    Attributes:
        metadata: the parts of a change beside the row, and the types of their columns.
    """

    metadata: ClassVar[Mapping[str, pa.DataType]]

    def __init__(self, settings: S, rows: pa.Schema) -> None:
        self.settings = settings
        self.rows = rows
        """The columns of the table that are read."""
        self.bounded = settings.bounded
        self._columns: tuple[str, ...] | None = None

    @property
    def schema(self) -> pa.Schema:  # type: ignore[override]  # read-only, as it follows from others
        """The operation, the row, the row before, and metadata; only the columns that are read."""
        settings = self.settings
        fields = [
            pa.field(settings.op, pa.string(), nullable=False),
            *(pa.field(each.name, each.type) for each in self.rows),
        ]
        if settings.before is not None:
            fields += [pa.field(settings.before + each.name, each.type) for each in self.rows]
        fields += [pa.field(name, self.metadata[kind]) for kind, name in settings.metadata.items()]
        return pa.schema(
            [field for field in fields if self._columns is None or field.name in self._columns]
        )

    def with_columns(self, columns: Sequence[str]) -> Self:
        # At least one column stays: a batch without columns has no rows to count.
        wanted = tuple(name for name in self.schema.names if name in set(columns))
        narrow = copy.copy(self)
        narrow._columns = wanted or (self.schema.names[0],)
        return narrow


def check_names(names: Sequence[str]) -> None:
    """Raise UsageError if two columns of a source have the same name."""
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise UsageError(
            f"two columns have the same name column=`{twice[0]}`",
            fix="change op=, before= or metadata=",
        )


def change_fields(
    kinds: Mapping[str, pa.DataType], lost: str, example: str, batch_rows: Field
) -> dict[str, Field]:
    """Return the fields of a manifest that all sources of changes have.

    Args:
        kinds: the metadata that there is.
        lost: says when changes cannot be read any more.
        example: of columns of metadata.
        batch_rows: the field with the most rows of a batch.
    """
    return {
        "snapshot": Field(
            ChoiceKind(_SNAPSHOTS), "whether the rows that the table has come first; initial"
        ),
        "op": Field(TextKind(), "the column with the operation; op"),
        "before": Field(
            TextKind(), "a prefix: also columns of the row before, under names with this prefix"
        ),
        "metadata": metadata_field(
            kinds, f"further columns, by what they hold, such as `{example}`"
        ),
        "stop": Field(ChoiceKind(("latest",)), "where reading ends; absent: never"),
        "onLost": Field(ChoiceKind(ON_LOST), f"changes cannot be read any more, {lost}; fail"),
        "newColumns": Field(
            ChoiceKind(_NEW_COLUMNS), "the table gets a column that is not in the schema; fail"
        ),
        "batchRows": batch_rows,
        "buffer": Field(size(), "most bytes that wait to be processed; 32mb"),
    }
