"""The splits of one source subtask, as event time sees them: which there are, and which is being read.

The reader tells, the steps of the chain behind it listen. Everything happens in the subtask's mailbox,
and the chain runs by direct calls: so `current` holds for a batch all the way to its event-time step.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from enum import Enum
from typing import Final, Protocol, final

WHOLE: Final = ""
"""Stands for all splits of a reader that does not tell of any, and for input that is not a source's."""


class History(Enum):
    """Where a reader stands that reads a history before it goes live."""

    NONE = ""
    """It is live, or has no history at all."""
    BEING_READ = "being read"
    OVER = "over"
    """Its own part is read; it waits until that of all subtasks is."""


class SplitListener(Protocol):
    """A step that keeps event time per split."""

    def split_opened(self, split: str, queued: bool) -> None:
        """There is a split to read; `queued` as in `SourceSplits.opened`."""
        ...

    def split_ended(self, split: str) -> None:
        """All records of the split have been processed."""
        ...

    def limit_announced(self, group: str, limit: int) -> None:
        """Splits whose watermark is above `limit` (ms) must wait for the rest of their group."""
        ...


class WatermarkReport(Protocol):
    """Takes what an aligned event-time step has reached."""

    def __call__(self, step: str, group: str, watermark: int | None) -> None:
        """`watermark` in ms; None: the step is idle, and nobody is to wait for it."""
        ...


def _nobody_listens(step: str, group: str, watermark: int | None) -> None:
    """Outside of a cluster there is no group."""


def _nobody_asks() -> None:
    """Outside of a cluster there is nobody who waits."""


@final
class SourceSplits:
    """What the reader of one subtask says of its splits. A reader that says nothing has one, `WHOLE`."""

    def __init__(self) -> None:
        self.current = WHOLE
        """The split that the batch under way is from."""
        self.behind_source = False
        """True in a chain that begins with a source."""
        self.at_rest = False
        """See `Source.at_rest`."""
        self.can_pause = False
        """The reader can leave out single splits."""
        self.report: WatermarkReport = _nobody_listens
        self.history = History.NONE
        """Set by the reader."""
        self.may_go_live = True
        """False until the history is over in all subtasks of the source."""
        self.on_history: Callable[[], None] = _nobody_asks
        """Called when `history` has changed."""
        self._open: dict[str, bool] = {}
        self._ended: list[str] = []
        self._listeners: list[SplitListener] = []
        self._paused_by: dict[str, frozenset[str]] = {}
        self.paused: frozenset[str] = frozenset()
        """Splits that are not to be read for now."""
        self.on_pause: Callable[[], None] | None = None
        """Called when `paused` has changed."""

    # -- the reader ---------------------------------------------------------------------------------

    def opened(self, split: str, *, queued: bool = False) -> None:
        """There is a split to read, with a name that is unique in the subtask and that users know.

        Args:
            queued: it is not looked at before the splits ahead of it are done: its silence means
                nothing until the first `reading`. Event time waits for it all the same.
        """
        self._open[split] = queued
        for listener in self._listeners:
            listener.split_opened(split, queued)

    def reading(self, split: str) -> None:
        """The batch that `poll` returns is from this split."""
        self.current = split
        self._open[split] = False

    def ended(self, split: str) -> None:
        """No record of the split follows the batch that `poll` is about to return."""
        self._ended.append(split)

    # -- the subtask --------------------------------------------------------------------------------

    def batch_done(self) -> None:
        """What `poll` returned last, if anything, has been processed to the end."""
        self.current = WHOLE
        if not self._ended:
            return
        ended, self._ended = self._ended, []
        for split in ended:
            self._open.pop(split, None)
            for listener in self._listeners:
                listener.split_ended(split)

    def announce(self, group: str, limit: int) -> None:
        """A group's splits may not be above `limit`, in ms."""
        for listener in self._listeners:
            listener.limit_announced(group, limit)

    @property
    def stands_still(self) -> bool:
        """Nothing may be read. A reader that cannot leave out single splits stops with the last one it
        is at; those that are queued behind them have to wait."""
        if not self.paused:
            return False
        could = {split for split, queued in self._open.items() if self.can_pause or not queued}
        return WHOLE in self.paused or could <= self.paused

    # -- the steps ----------------------------------------------------------------------------------

    def listen(self, listener: SplitListener) -> None:
        """Tell `listener` of all splits there are and will be."""
        self._listeners.append(listener)
        for split, queued in self._open.items():
            listener.split_opened(split, queued)

    def pause(self, step: str, splits: Set[str]) -> None:
        """Have these splits, and no others on behalf of `step`, wait."""
        self._paused_by[step] = frozenset(splits)
        paused = frozenset().union(*self._paused_by.values())
        if paused != self.paused:
            self.paused = paused
            if self.on_pause is not None:
                self.on_pause()
