"""The arguments that all sources of changes have, and their fields in a manifest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import pyarrow as pa

from ...api.manifest.fields import ChoiceKind, Field, TextKind, size
from ...errors import UsageError
from ...operators.suggestions import suggest
from ..arguments import ON_LOST, check_choice, check_count
from ..manifest_fields import metadata_field

Snapshot: TypeAlias = Literal["initial", "never"]
NewColumns: TypeAlias = Literal["fail", "ignore"]
BUFFER: Final = "32mb"
_SNAPSHOTS: Final[tuple[Snapshot, ...]] = ("initial", "never")
_NEW_COLUMNS: Final[tuple[NewColumns, ...]] = ("fail", "ignore")


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
