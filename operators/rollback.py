"""Tables of slots in memory that can go back to a checkpoint, instead of being read again.

`state/keyed/rollback.py` does the same for keyed state in dictionaries. Here each cut of a checkpoint opens
a cut of the slots that is kept (`state/slots/epochs.py`). What a table had at the cut, such as a window
that has been dropped since, is kept with it as a whole. The table of the next attempt takes over what the
cut refers to, and lets it go back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, Protocol, Self, TypeVar

from ..errors import InternalError
from ..state.queryable import CommittedPoints
from ..state.snapshot import KeptState, RestoredState
from .keyed_backend import kept_bytes_max


class Kept(Protocol):
    """A cut to which a part of a table, or the whole, can go back."""

    @property
    def nbytes(self) -> int:
        """Roughly the memory that it takes beside the table."""
        ...

    def close(self) -> None:
        """Note no more old values. It can still go back to what was noted."""
        ...


K = TypeVar("K", bound=Kept)


class _KeptCut(Generic[K]):
    """The cut of one checkpoint, as old values for `CommittedPoints`. Each has all since its cut."""

    __slots__ = ("kept",)

    def __init__(self, kept: K) -> None:
        self.kept = kept

    @property
    def nbytes(self) -> int:
        return self.kept.nbytes

    def absorb(self, later: Self) -> None:
        pass

    def close(self) -> None:
        self.kept.close()


def _nothing_to_keep() -> Any:
    raise InternalError("this table cannot go back")


class Rollback(Generic[K]):
    """The checkpoints to which a table of an operator can go back; none unless the options say so.

    Args:
        options: of the job.
        state: the name of the table.
        keep: opens a cut of the table as it is now; it is called just after the table has counted a cut.
    """

    def __init__(self, options: Mapping[str, str], state: str, keep: Callable[[], K]) -> None:
        self._state = state
        self._points: CommittedPoints[_KeptCut[K]] | None = None
        if bytes_max := kept_bytes_max(options):
            self._points = CommittedPoints(lambda: _KeptCut(keep()), bytes_max, _KeptCut.close)

    @classmethod
    def off(cls) -> Rollback[K]:
        """Return that of a table which cannot go back."""
        return cls({}, "", _nothing_to_keep)

    def grew(self) -> None:
        """Note that there are more old values: if they are too many, nothing is kept until the next cut."""
        if self._points is not None:
            self._points.grew()

    def cut(self, checkpoint_id: int) -> None:
        """Note that the table has just counted the cut of a checkpoint."""
        if self._points is not None:
            self._points.cut(checkpoint_id)

    def restored(self, checkpoint_id: int) -> None:
        """Note that the table is as at a checkpoint, after a restore."""
        if self._points is not None:
            self._points.restored(checkpoint_id)

    def completed(self, checkpoint_id: int) -> None:
        """Note that a checkpoint is complete."""
        if self._points is not None:
            self._points.completed(checkpoint_id)

    def aborted(self, checkpoint_id: int) -> None:
        """Note that a checkpoint will never be complete."""
        if self._points is not None:
            self._points.aborted(checkpoint_id)

    def keep(self) -> dict[str, KeptState]:
        """Return the table for the next attempt; see `Operator.keep`."""
        if self._points is None:
            return {}
        kept = {id_: cut.kept for id_, cut in self._points.take_all().items()}
        return {self._state: KeptState(frozenset(kept), kept)}

    def found(self, state: RestoredState) -> K | None:
        """Return the cut to which the table of the attempt before goes back; None: it has to be read."""
        if self._state not in state.kept:
            return None
        kept: K = state.kept[self._state].content[state.checkpoint_id]
        return kept

    def close(self) -> None:
        """Let go of the old values: they are in circles of references with the table."""
        if self._points is not None:
            self._points.take_all()
            self._points = None
