"""A source of the changes of one table: its columns."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic, Self, TypeVar

import pyarrow as pa

from ...operators.source import Source
from .settings import ChangeSettings

S = TypeVar("S", bound=ChangeSettings)


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
