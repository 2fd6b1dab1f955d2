"""The event time in snapshots of tumbling windows, per key group: watermark and expiry."""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa

from ...state.aggregates.accumulators import Mask
from ...state.snapshot import KEY_GROUP_COLUMN, StateInfo, TableCut
from ...state.values import Index
from ..ahead import Ahead
from ..base import OperatorContext
from ..key_group_times import WATERMARK_COLUMN, by_group, times_cut, times_info, times_schema
from .kinds import TumblingWindow

WATERMARK: Final = "watermark"
"""The name of the table."""
_GONE_THROUGH: Final = "gone_through"
_SCHEMA: Final = times_schema(WATERMARK_COLUMN, _GONE_THROUGH)
"""`gone_through`: windows that start at this time (ms) or before have expired."""
INT64_MIN: Final = int(np.iinfo(np.int64).min)


def watermark_info() -> StateInfo:
    """Return the declaration of the table."""
    return times_info(WATERMARK, "window", _SCHEMA)


def watermark_cut(
    context: OperatorContext, watermark: int, gone_through: int, ahead: Ahead | None
) -> TableCut:
    """Return the table: the same for all own key groups, unless some are ahead."""
    own = context.key_groups
    if ahead is None:
        return times_cut(own, _SCHEMA, watermark, gone_through)
    return times_cut(own, _SCHEMA, *ahead.cut(own, watermark, gone_through))


class RestoredTimes:
    """The table of a restored snapshot, which has rows.

    Attributes:
        watermark: the least of all own key groups, ms.
        gone_through: the least of all own key groups, ms.
    """

    def __init__(self, table: pa.Table, window: TumblingWindow, max_parallelism: int) -> None:
        self._window = window
        self._watermarks = by_group(table, WATERMARK_COLUMN, max_parallelism)
        gone = self._gone(table)
        self._gone_by_group = np.full(max_parallelism, INT64_MIN)
        self._gone_by_group[table.column(KEY_GROUP_COLUMN).to_numpy()] = gone
        self.watermark = int(table.column(WATERMARK_COLUMN).to_numpy().min())
        self.gone_through = int(gone.min())

    def _gone(self, table: pa.Table) -> Index:
        """Return the start up to which windows of each key group had expired; older snapshots lack it."""
        if _GONE_THROUGH in table.column_names:
            gone: Index = table.column(_GONE_THROUGH).to_numpy()
            return gone
        times, last_gone = table.column(WATERMARK_COLUMN).to_pylist(), self._window.last_gone
        return np.array([max(last_gone(time), INT64_MIN) for time in times], np.int64)

    def were_gone(self, groups: Index, starts: Index) -> Mask:
        """Return True for rows whose window had expired when and where the cut was taken."""
        gone = self._gone_by_group[groups]
        mask: Mask = (starts <= gone) & (gone > INT64_MIN)
        return mask

    def ahead(self) -> Ahead | None:
        """Key groups that are ahead; the bound is the last instant of which rows are late."""
        window = self._window
        both = np.stack([self._watermarks, self._gone_by_group])
        pairs, which = np.unique(both, axis=1, return_inverse=True)
        # By today's lateness, too.
        bounds = [
            max(window.first_behind(through), window.first_kept(time)) - 1
            for time, through in pairs.T.tolist()
        ]
        gone = np.array([max(bound, INT64_MIN) for bound in bounds], np.int64)
        return Ahead.restored(self._watermarks, self.watermark, gone[which.ravel()])
