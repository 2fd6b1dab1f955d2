"""The progress of event time as the user's context shows it: that of the subtask, or of the current key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...state.hashing import hash_key, hash_keys, key_group_of, key_groups_of
from ...state.keyed.base import KeyedBackend
from ...state.snapshot import RestoredState, TableCut
from ...state.values import Index
from ..base import OperatorContext
from ..time_progress import WATERMARK_COLUMN, KeyGroupTable, TimeProgress
from .context import Context


def progress_table(name: str) -> KeyGroupTable:
    """Return the table of the progress of event time."""
    return KeyGroupTable.of_times(name, "window", WATERMARK_COLUMN)


class ShownProgress:
    """Sets the current key, and shows its event time in the user's context.

    Args:
        table: the name of the table with the progress; empty if it is not part of the state.
        backend: the keyed state.
        context: the context of the subtask.
        shown: the user's context.
    """

    def __init__(
        self, table: str, backend: KeyedBackend, context: OperatorContext, shown: Context[Any]
    ) -> None:
        self._backend, self._context, self._shown = backend, context, shown
        self._time = TimeProgress(progress_table(table))
        self._time.open(context)

    @property
    def watermark(self) -> int:
        """The watermark of the subtask, which all keys have reached."""
        return self._time.watermark

    def advance(self, timestamp: int) -> None:
        """Advance event time to `timestamp` for all keys."""
        self._time.advance(timestamp)
        self._show(self.watermark)

    def _show(self, watermark: int) -> None:
        self._shown.watermark = watermark
        self._shown._passed = self.watermark

    # --- keys ----------------------------------------------------------------------------------

    def groups_of(self, keys: list[Any]) -> Sequence[int]:
        """Return the key groups of some keys, for `enter`; -1 where they are not needed."""
        if not self._time.differs and not self._backend.needs_key_groups:
            return [-1] * len(keys)
        groups: list[int] = self._groups(keys).tolist()
        return groups

    def _groups(self, keys: list[Any]) -> Index:
        return key_groups_of(hash_keys(keys), self._context.max_parallelism).astype(np.int64)

    def of_keys(self, keys: list[Any]) -> int | Index:
        """Return the watermark of each key, or of all."""
        return self._time.now(self._groups(keys) if self._time.differs else None)

    @property
    def differs(self) -> bool:
        """True if some keys have progressed further than the subtask."""
        return self._time.differs

    def enter(self, key: Any, group: int) -> None:
        """Set the current key."""
        self._backend.set_key(key, group)
        if self._time.differs:
            self._show(self._time.now_of(group))

    def enter_one(self, key: Any) -> None:
        """Set a single current key."""
        group = -1
        if self._time.differs or self._backend.needs_key_groups:
            group = key_group_of(hash_key(key), self._context.max_parallelism)
        self.enter(key, group)

    def leave(self) -> None:
        """Unset the current key."""
        self._backend.clear_key()
        self._show(self.watermark)

    # --- state ---------------------------------------------------------------------------------

    def cut(self) -> TableCut:
        """Return the event time of each key group."""
        return self._time.cut()

    def restore(self, state: RestoredState) -> None:
        """Restore event time; a key never goes back."""
        self._time.restore(state)
        self._show(self.watermark)
