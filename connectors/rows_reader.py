"""Rows on their way from a server that may take its time, or be away for a while, to their subtask."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..operators.base import OperatorContext
from ..operators.elements import Batch, Positions
from .bad_records import OnBadRecord
from .fetched_splits import FetchedSplitsReader, P, Piece

ROW_BYTES: Final = 200
"""About what a row takes beside its values, until it is a part of a batch."""
_AWAY_PAUSE_S: Final = 0.5
_log = logging.getLogger(__name__)


class Closed(Exception):
    """The reader was closed."""


class RowsReader(FetchedSplitsReader[P]):
    """Reads rows in a thread that goes on when a server that was away comes back.

    The thread reads one split after the other, so none of them can be paused by itself.
    """

    can_pause_splits = False

    def __init__(self, buffer_bytes: int) -> None:
        super().__init__(buffer_bytes, OnBadRecord.FAIL, "the table")
        self._handed_over = 0
        """The number of pieces that were handed over."""

    # -- what a subclass has ------------------------------------------------------------------------

    def read(self) -> None:
        """Read all that follows the last piece that was handed over; called in the thread."""
        raise NotImplementedError

    def move(self, piece: Piece[P]) -> None:
        """Move the position from which the thread goes on behind a piece."""
        raise NotImplementedError

    def offsets(self, piece: Piece[P]) -> npt.NDArray[np.int64]:
        """Return the offsets of the rows of a piece, for dead letters."""
        raise NotImplementedError

    def why_away(self, error: Exception, *, went_on: bool) -> str:
        """Return why the server is away, so that reading goes on when it is back.

        Args:
            error: that ended `read`.
            went_on: something was read before that.

        Raises:
            Exception: the server is not away. It is the error that users see.
        """
        raise NotImplementedError

    # -- the mailbox --------------------------------------------------------------------------------

    def open(self, context: OperatorContext, reject: Callable[[Batch], None]) -> None:
        super().open(context, reject)
        self._application = f"headgate-{context.job_name}-{context.operator_name}"

    def places(self, piece: Piece[P]) -> Positions:
        name = self.context.operator_name
        return Positions(name, piece.position.name, self.offsets(piece))

    # -- the thread ---------------------------------------------------------------------------------

    def fetch_forever(self) -> None:
        """Read until there is nothing more or the reader is closed; wait for a server that is away."""
        with contextlib.suppress(Closed):
            while True:
                before = self._handed_over
                try:
                    self.read()
                except Exception as error:
                    reason = self.why_away(error, went_on=self._handed_over > before)
                    _log.warning("reading goes on as soon as the server is back: %s", reason)
                    self.pause(_AWAY_PAUSE_S)
                else:
                    return

    def pause(self, seconds: float) -> None:
        """Wait for this time, or raise when the reader is closed."""
        with self._shared.changed:
            if self._shared.changed.wait_for(lambda: self._shared.closed, seconds):
                raise Closed

    def gathers(self) -> bool:
        """Return True while small pieces wait for the mailbox, so that more rows had better gather."""
        with self._shared.changed:
            return self.should_gather()

    def hand_over(self, piece: Piece[P], serve: Callable[[], None] = lambda: None) -> None:
        """Give a piece to the mailbox, once it has room; call `serve` now and then until it has."""
        shared = self._shared
        while True:
            with shared.changed:
                if not shared.closed and (not self.is_full() or not piece.size_bytes):
                    break
                if not shared.closed:
                    shared.changed.wait(1)
                closed = shared.closed
            serve()
            if closed:
                raise Closed
        self._handed_over += 1
        self.move(piece)
        self.put(piece)


def key_at(keys: Any, row: int) -> list[str]:
    """Return the key of a row, as texts.

    Args:
        keys: a `RecordBatch` of the keys of rows.
        row: the number of the row; -1: the last one.
    """
    return [column[row].as_py() for column in keys.columns]
