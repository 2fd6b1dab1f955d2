"""The progress of event time, for a subtask and for the current key, as the user's context shows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from ...state.hashing import hash_key, hash_keys, key_group_of, key_groups_of
from ...state.keyed.base import KeyedBackend
from ...state.snapshot import RestoredState, StateInfo, TableCut
from ...state.values import Index
from ..ahead import Ahead
from ..base import OperatorContext
from ..elements import WATERMARK_MIN
from ..key_group_times import WATERMARK_COLUMN, by_group, least, times_cut, times_info, times_schema
from .context import Context

_SCHEMA: Final = times_schema(WATERMARK_COLUMN)


class Progress:
    """Event time in one subtask. Sets the current key, and with it the key's event time.

    Args:
        backend: of the keyed state.
        context: of the subtask.
        shown: the user's context.
    """

    def __init__(
        self, backend: KeyedBackend, context: OperatorContext, shown: Context[Any]
    ) -> None:
        self._backend, self._context, self._shown = backend, context, shown
        self._ahead: Ahead | None = None
        self.watermark = WATERMARK_MIN
        """The watermark of the subtask, which all keys have reached."""

    def advance(self, timestamp: int) -> None:
        """Advance event time to `timestamp` for all keys."""
        self.watermark = max(self.watermark, timestamp)
        if self._ahead is not None and self._ahead.caught_up(self.watermark, WATERMARK_MIN):
            self._ahead = None
        self._show(self.watermark)

    def _show(self, watermark: int) -> None:
        self._shown.watermark = watermark
        self._shown._passed = self.watermark

    # --- keys ----------------------------------------------------------------------------------

    def groups_of(self, keys: list[Any]) -> Sequence[int]:
        """Return the key groups of some keys, for `enter`; -1 where they are not needed."""
        if self._ahead is None and not self._backend.needs_key_groups:
            return [-1] * len(keys)
        groups: list[int] = self._groups(keys).tolist()
        return groups

    def _groups(self, keys: list[Any]) -> Index:
        return key_groups_of(hash_keys(keys), self._context.max_parallelism).astype(np.int64)

    def of_keys(self, keys: list[Any]) -> int | Index:
        """Return the watermark of each key, or of all."""
        if self._ahead is None:
            return self.watermark
        return self._ahead.now(self._groups(keys), self.watermark)

    @property
    def differs(self) -> bool:
        """True if event time is ahead for some keys."""
        return self._ahead is not None

    def enter(self, key: Any, group: int) -> None:
        """Set the current key."""
        self._backend.set_key(key, group)
        if self._ahead is not None:
            self._show(max(self.watermark, int(self._ahead.watermarks[group])))

    def enter_one(self, key: Any) -> None:
        """Set a single current key."""
        group = -1
        if self._ahead is not None or self._backend.needs_key_groups:
            group = key_group_of(hash_key(key), self._context.max_parallelism)
        self.enter(key, group)

    def leave(self) -> None:
        """Unset the current key."""
        self._backend.clear_key()
        self._show(self.watermark)

    # --- state ---------------------------------------------------------------------------------

    @staticmethod
    def info(table: str) -> StateInfo:
        """Return the declaration of the table."""
        return times_info(table, "window", _SCHEMA)

    def cut(self) -> TableCut:
        """Return the event time of each key group."""
        own, ahead = self._context.key_groups, self._ahead
        if ahead is None:
            return times_cut(own, _SCHEMA, self.watermark)
        return times_cut(own, _SCHEMA, ahead.cut(own, self.watermark, WATERMARK_MIN)[0])

    def restore(self, state: RestoredState, table: str) -> None:
        """Restore event time from `table`; a key never goes back."""
        watermark = least(state, table)
        if watermark is not None:
            times = by_group(state.tables[table], WATERMARK_COLUMN, self._context.max_parallelism)
            self._ahead = Ahead.restored(times, watermark)
            self.advance(watermark)
