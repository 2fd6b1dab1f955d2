"""The splits of one source subtask for event time: which exist, and which is being read.

The reader reports them; the steps of the chain after it listen. Everything happens in the subtask's
mailbox, and the chain runs by direct calls, so `current` is valid for a batch all the way to its
event-time step.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from enum import Enum
from typing import Final, Protocol, final

WHOLE: Final = ""
"""Stands for all splits of a reader that reports none, and for input that is not a source's."""


class History(Enum):
    """The phase of a reader that reads a history before it goes live."""

    NONE = ""
    """It is live, or has no history at all."""
    BEING_READ = "being read"
    OVER = "over"
    """Its own part is read; it waits until that of all subtasks is."""


class SplitListener(Protocol):
    """A step that keeps event time per split."""

    def split_opened(self, split: str, queued: bool) -> None:
        """Handle a new split; `queued` as in `SourceSplits.opened`."""
        ...

    def split_ended(self, split: str) -> None:
        """Handle the end of a split: all its records have been processed."""
        ...

    def limit_announced(self, group: str, limit: int) -> None:
        """Make splits whose watermark is above `limit` (ms) wait for the rest of their group."""
        ...


class WatermarkReport(Protocol):
    """Receives the progress of an aligned event-time step."""

    def __call__(self, step: str, group: str, watermark: int | None) -> None:
        """Report `watermark` in ms; None: the step is idle and must not be waited for."""
        ...


def _nobody_listens(step: str, group: str, watermark: int | None) -> None:
    """Do nothing: outside a cluster there is no group."""


def _nobody_asks() -> None:
    """Do nothing: outside a cluster nothing waits."""


@final
class SourceSplits:
    """The splits that the reader of one subtask reports.

    A reader that reports none has one, `WHOLE`.
    """

    def __init__(self) -> None:
        self.current = WHOLE
        """The split of the current batch."""
        self.behind_source = False
        """True in a chain that begins with a source."""
        self.at_rest = False
        """See `Source.at_rest`."""
        self.can_pause = False
        """True if the reader can leave out single splits."""
        self.report: WatermarkReport = _nobody_listens
        self.history = History.NONE
        """The phase, set by the reader."""
        self.may_go_live = True
        """False until the history is over in all subtasks of the source."""
        self.on_history: Callable[[], None] = _nobody_asks
        """Called when `history` has changed."""
        self._open: dict[str, bool] = {}
        self._ended: list[str] = []
        self._listeners: list[SplitListener] = []
        self._paused_by: dict[str, frozenset[str]] = {}
        self.paused: frozenset[str] = frozenset()
        """The splits that must not be read for now."""
        self.on_pause: Callable[[], None] | None = None
        """Called when `paused` has changed."""

    # -- the reader ---------------------------------------------------------------------------------

    def opened(self, split: str, *, queued: bool = False) -> None:
        """Report a split to read, with a name that is unique in the subtask and that users know.

        Args:
            queued: it is not read before the splits ahead of it are done, so it is not idle until
                the first `reading`. Event time waits for it all the same.
        """
        self._open[split] = queued
        for listener in self._listeners:
            listener.split_opened(split, queued)

    def reading(self, split: str) -> None:
        """Report the split of the batch that `poll` returns."""
        self.current = split
        self._open[split] = False

    def ended(self, split: str) -> None:
        """Report that no record of the split follows the batch that `poll` is about to return."""
        self._ended.append(split)

    # -- the subtask --------------------------------------------------------------------------------

    def batch_done(self) -> None:
        """Note that the last batch of `poll`, if any, has been fully processed."""
        self.current = WHOLE
        if not self._ended:
            return
        ended, self._ended = self._ended, []
        for split in ended:
            self._open.pop(split, None)
            for listener in self._listeners:
                listener.split_ended(split)

    def announce(self, group: str, limit: int) -> None:
        """Announce that a group's splits may not be above `limit`, in ms."""
        for listener in self._listeners:
            listener.limit_announced(group, limit)

    @property
    def stands_still(self) -> bool:
        """Return True if nothing may be read.

        A reader that cannot leave out single splits stops with the current one; queued splits have
        to wait.
        """
        if not self.paused:
            return False
        could = {split for split, queued in self._open.items() if self.can_pause or not queued}
        return WHOLE in self.paused or could <= self.paused

    # -- the steps ----------------------------------------------------------------------------------

    def listen(self, listener: SplitListener) -> None:
        """Report all current and future splits to `listener`."""
        self._listeners.append(listener)
        for split, queued in self._open.items():
            listener.split_opened(split, queued)

    def pause(self, step: str, splits: Set[str]) -> None:
        """Make these splits wait, and no others on behalf of `step`."""
        self._paused_by[step] = frozenset(splits)
        paused = frozenset().union(*self._paused_by.values())
        if paused != self.paused:
            self.paused = paused
            if self.on_pause is not None:
                self.on_pause()
