"""The treatment of records that a source cannot read: it fails, drops them, or sets them aside."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Literal, TypeAlias

import pyarrow as pa

from ..errors import BadRecordError
from ..operators.base import OperatorContext
from ..operators.drops import DropKind
from ..operators.elements import Batch, ColumnBatch
from .arguments import check_policy
from .files.decode import excerpt


class OnBadRecord(Enum):
    """The treatment of a record that cannot be read."""

    FAIL = "fail"
    DROP = "drop"
    SIDE_OUTPUT = "side_output"


BadRecordPolicy: TypeAlias = Literal["fail", "drop", "side_output"]


def parse_policy(text: BadRecordPolicy) -> OnBadRecord:
    """Return the policy with this name; raises UsageError if there is none."""
    check_policy("on_bad_record", text, [policy.value for policy in OnBadRecord])
    return OnBadRecord(text)


class BadRecordHandler:
    """Applies the policy of one reader, and counts the records as `source_record_errors`.

    Args:
        policy: the user's choice.
        context: that of the reader.
        reject: sends a batch to the side output.
        what: the thing to correct, for the error, such as `the file`.
    """

    def __init__(
        self,
        policy: OnBadRecord,
        context: OperatorContext,
        reject: Callable[[Batch], None],
        what: str,
    ) -> None:
        self._policy = policy
        self._context = context
        self._reject = reject
        self._what = what
        self._errors = context.metrics.counter("source_record_errors")

    def handle(
        self,
        count: int,
        first: Callable[[], tuple[str, str, bytes | str]],
        rejected: Callable[[], pa.RecordBatch],
    ) -> None:
        """Handle bad records.

        Args:
            count: their number.
            first: describes the first one: where it is, the reason, and the record.
            rejected: makes the rows for the side output.

        Raises:
            BadRecordError: the policy is to fail.
        """
        if self._policy is OnBadRecord.FAIL:
            where, reason, record = first()
            raise BadRecordError(
                f"an input record could not be read: {reason} record=`{excerpt(record)}`",
                where=where,
                fix=f"correct {self._what}, or choose on_bad_record=`drop` or `side_output`",
            )
        self._errors.inc(count)
        if self._policy is OnBadRecord.DROP:
            drops = self._context.drops
            drops.add(DropKind.UNREADABLE, count)
            if drops.samples is not None and drops.samples.room(DropKind.UNREADABLE) > 0:
                where, reason, record = first()
                drops.samples.add(
                    DropKind.UNREADABLE, position=where, error_text=reason, value=record
                )
        else:
            self._reject(ColumnBatch(rejected()))
