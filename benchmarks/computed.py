"""Bids like Nexmark's, each computed from its number: the stream of the comparison with Flink.

Nothing is kept in memory and handed out again. Row n has one draw of 64 bits, `_draws(n)`, and every
column is arithmetic on n and some bits of it, so that numpy here, Java in `peers/java/Bids.java` and SQL in
the tests make the same rows. Ids, hot auctions and hot bidders, the range of prices and event time are as
in Nexmark: of 50 events 46 are bids, half of the bids go to the newest hot auction, three of four come from
the hot bidder, and 50 events take 5 ms. `extra` is 56 letters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headgate.connectors.rows import RowSource
from headgate.operators.elements import ColumnBatch

Draws = npt.NDArray[np.uint64]
BATCH_ROWS = 32_768
"""As many as sources of headgate have by default."""
BASE_TIME_MS = 1_436_918_400_000
BIDS = 46
"""Bids of an epoch; the epoch has three auctions and a person besides."""
FIRST_ID = 1_000
HOT_EVERY = 100
ACTIVE_AUCTIONS, ACTIVE_PERSONS, LEAD = 100, 1_000, 11
WORDS = 7
"""`extra` has this many words of eight letters."""
MULTIPLIERS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9)
LETTERS_MASK, LETTERS = 0x0F0F0F0F0F0F0F0F, 0x6161616161616161
"""A word has in each byte `a` to `p`."""
SCHEMA = pa.schema(
    [
        ("auction", pa.int64()),
        ("bidder", pa.int64()),
        ("price", pa.int64()),
        ("date_time", pa.timestamp("ms")),
        ("extra", pa.string()),
    ]
)


def _draws(first: int, count: int) -> Draws:
    """Return 64 mixed bits for each row."""
    mixed = np.arange(first, first + count, dtype=np.uint64)
    mixed *= np.uint64(MULTIPLIERS[0])
    mixed ^= mixed >> np.uint64(32)
    mixed *= np.uint64(MULTIPLIERS[1])
    mixed ^= mixed >> np.uint64(29)
    return mixed


def _bits(draws: Draws, shift: int, width: int) -> npt.NDArray[np.int64]:
    return ((draws >> np.uint64(shift)) & np.uint64((1 << width) - 1)).view(np.int64)


def _recent(
    newest: npt.NDArray[np.int64], draw: npt.NDArray[np.int64], window: int
) -> npt.NDArray[np.int64]:
    """Return one of the last `window` ids, or one that comes a little later; `draw` has 16 bits."""
    oldest = np.maximum(newest - window, 0)
    return oldest + (draw * (newest - oldest + LEAD) >> 16) + FIRST_ID


def _auction(epoch: npt.NDArray[np.int64], _: npt.NDArray[np.int64], draws: Draws) -> pa.Array:
    newest = epoch * 3 + 2
    hot = newest // HOT_EVERY * HOT_EVERY + FIRST_ID
    cold = _recent(newest, _bits(draws, 1, 16), ACTIVE_AUCTIONS)
    return pa.array(np.where(_bits(draws, 0, 1) != 0, hot, cold))


def _bidder(epoch: npt.NDArray[np.int64], _: npt.NDArray[np.int64], draws: Draws) -> pa.Array:
    hot = epoch // HOT_EVERY * HOT_EVERY + 1 + FIRST_ID
    cold = _recent(epoch, _bits(draws, 19, 16), ACTIVE_PERSONS)
    return pa.array(np.where(_bits(draws, 17, 2) != 0, hot, cold))


def _price(epoch: npt.NDArray[np.int64], _: npt.NDArray[np.int64], draws: Draws) -> pa.Array:
    """Return 100 to about 80 million, small ones as often as large ones."""
    return pa.array((_bits(draws, 35, 7) + 1) * 100 << (_bits(draws, 42, 10) * 13 >> 10))


def _time(epoch: npt.NDArray[np.int64], rest: npt.NDArray[np.int64], _: Draws) -> pa.Array:
    return pa.array(epoch * 5 + (rest + 4) // 10 + BASE_TIME_MS, pa.timestamp("ms"))


def _extra(epoch: npt.NDArray[np.int64], _: npt.NDArray[np.int64], draws: Draws) -> pa.Array:
    words = np.empty((len(draws), WORDS), dtype="<u8")
    for number in range(WORDS):
        word = draws * np.uint64(MULTIPLIERS[0] + 2 * number)
        word >>= np.uint64(4)
        word &= np.uint64(LETTERS_MASK)
        word += np.uint64(LETTERS)
        words[:, number] = word
    ends = np.arange(0, (len(draws) + 1) * WORDS * 8, WORDS * 8, dtype=np.int32)
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(words)]
    return pa.Array.from_buffers(pa.string(), len(draws), buffers)


_Column = Callable[[npt.NDArray[np.int64], npt.NDArray[np.int64], Draws], pa.Array]
_COLUMNS: dict[str, _Column] = {
    "auction": _auction,
    "bidder": _bidder,
    "price": _price,
    "date_time": _time,
    "extra": _extra,
}


class ComputedBids(RowSource):
    """The first `rows` bids; makes the columns that the job uses."""

    def __init__(
        self, rows: int, columns: Sequence[str] = SCHEMA.names, batch_rows: int = BATCH_ROWS
    ) -> None:
        super().__init__(rows, None, batch_rows)
        self.schema = pa.schema([SCHEMA.field(name) for name in columns])

    def with_columns(self, columns: Sequence[str]) -> ComputedBids:
        # A batch without columns would have no rows to count.
        kept = [name for name in SCHEMA.names if name in columns] or SCHEMA.names[:1]
        assert self.rows is not None
        return ComputedBids(self.rows, kept, self.batch_rows)

    def make(self, first: int, count: int) -> ColumnBatch:
        numbers = np.arange(first, first + count, dtype=np.int64)
        epoch = numbers // BIDS
        rest = numbers - epoch * BIDS
        drawn = any(name != "date_time" for name in self.schema.names)
        draws = _draws(first, count) if drawn else np.empty(0, np.uint64)
        columns = [_COLUMNS[name](epoch, rest, draws) for name in self.schema.names]
        return ColumnBatch(pa.RecordBatch.from_arrays(columns, schema=self.schema))

    def describe(self) -> str:
        return f"computed_bids({', '.join(self.schema.names)}; {self.rows:,} rows)"
