"""Samples of the records that a subtask drops, for people who look for the reason.

A sample says where the record stood in its source, its event time, and the type of the error. Its value and
the text of the error, which often quotes it, are taken only if the job allows it: others may see them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, final

import msgspec

from .elements import WATERMARK_MAX, WATERMARK_MIN, Batch, ColumnBatch

TEXT_MAX: Final = 500
"""A longer text is cut, in characters."""
AT_ONCE_MAX: Final = 5
"""A subtask takes this many samples of one step and kind until they are sent, about once a second."""


@final
class LostRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A record that a step has dropped.

    Attributes:
        step: its name.
        kind: the reason for the drop, a `DropKind`.
        event_time: in ms since the epoch; None: it has none.
        watermark: the watermark of the step at that time; None: there was none.
        position: where the record stood in its source; empty where that is not known any more.
        error: the type of the error; with `value` also its text.
        value: the record; None: values are not shown.
    """

    step: str
    kind: str
    event_time: int | None = None
    watermark: int | None = None
    position: str = ""
    error: str = ""
    value: str | None = None


@final
class Samples:
    """The samples of one operator subtask that wait until they are sent."""

    def __init__(self, step: str, *, values: bool) -> None:
        """`values`: whether records and texts of errors are part of the samples."""
        self._step, self._values = step, values
        self._kept: dict[str, list[LostRecord]] = {}

    def room(self, kind: str) -> int:
        """Return the number of samples of a kind that may be taken now."""
        return AT_ONCE_MAX - len(self._kept.get(kind, ()))

    def add(
        self,
        kind: str,
        *,
        position: str = "",
        error: str = "",
        error_text: str = "",
        value: str | bytes = "",
        event_time: int | None = None,
        watermark: int | None = None,
    ) -> None:
        """Take a sample, if there is room."""
        if self.room(kind) <= 0:
            return
        shown: str | None = None
        if self._values:
            shown = shortened(value if isinstance(value, str) else value.decode(errors="replace"))
            error = shortened(": ".join(text for text in (error, error_text) if text))
        found = LostRecord(
            step=self._step,
            kind=kind,
            event_time=event_time,
            watermark=None if watermark in (WATERMARK_MIN, WATERMARK_MAX) else watermark,
            position=shortened(position),
            error=error,
            value=shown,
        )
        self._kept.setdefault(kind, []).append(found)

    def add_rows(
        self,
        kind: str,
        batch: Batch,
        errors: Sequence[BaseException] = (),
        watermark: int | None = None,
    ) -> None:
        """Take samples of the first rows of a batch; `errors` has one for each row, or is empty."""
        times, positions = batch.timestamps, batch.positions
        for row in range(min(self.room(kind), len(batch))):
            error = errors[row] if errors else None
            place = ""
            if positions is not None:
                place = f"{positions.source} {positions.split} {positions.offsets[row]}"
            self.add(
                kind,
                position=place,
                error="" if error is None else type(error).__name__,
                error_text="" if error is None else str(error),
                value=_text(batch, row) if self._values else "",
                event_time=None if times is None else int(times[row]),
                watermark=watermark,
            )

    def take(self) -> tuple[LostRecord, ...]:
        """Return the samples, and forget them."""
        if not self._kept:
            return ()
        found = tuple(each for kept in self._kept.values() for each in kept)
        self._kept = {}
        return found


def shortened(text: str) -> str:
    """Return a text of at most `TEXT_MAX` characters."""
    return text if len(text) <= TEXT_MAX else f"{text[: TEXT_MAX - 1]}…"


def _text(batch: Batch, row: int) -> str:
    record: Any
    if isinstance(batch, ColumnBatch):
        (record,) = batch.data.slice(row, 1).to_pylist()
    else:
        record = batch.records[row]
    try:
        return repr(record)
    except Exception as error:  # a class of the user's
        return f"<{type(record).__name__} without a text: {type(error).__name__}>"
