"""Consistent cuts of dictionaries that go on changing, at a cost that does not grow with them.

A cut opens an *undo log*. While one is open, a write first stores the old value there (once per address),
then writes. A thread that reads the cut reads the live value first and the undo logs after it; a value in
a log wins. So it sees the state at the cut, without locks, one atomic dictionary operation at a time.

Cuts are a linked list, oldest to newest; writes go to the log of the newest only, and a reader looks
through the logs from its own cut on. It asks for the next cut before it looks into a log: once there is
one, the log is complete. The other way round, a write, a cut and a second write might come in between,
and the reader would find the value of the newer cut. Logs that no reader can need are dropped with the
cuts in front.

For deltas, the addresses that changed between two cuts are kept as a set per cut, until it is confirmed
that no delta will reach back so far.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Final

from ...errors import InternalError
from ..values import Index

PARTS: Final = 251
"""The number of parts. It is a prime, so that keys at regular distances spread too."""
_SEALED_MAX = 32
LOOK_EVERY: Final = 4_096
"""The memory of old values that are kept is looked at once in this many of them."""
Address = Hashable


def part_of(address: Address) -> int:
    """Return the part of an address. Threads read tables a part at a time."""
    return hash(address) % PARTS


def parts_of(addresses: Sequence[Address], numbers: Index | None = None) -> list[int]:
    """Return the part of each address; `numbers` are the addresses, where they are ints at hand in that
    form.
    """
    if numbers is not None and len(numbers):
        low, high = numbers.min(), numbers.max()
        if low >= 0 and high < sys.hash_info.modulus:  # such an int is its own hash
            parts: list[int] = (numbers % PARTS).tolist()
            return parts
    return [hash(address) % PARTS for address in addresses]


class Cut:
    """One cut: its number, its undo log by part, and the cut after it."""

    __slots__ = ("epoch", "later", "open", "undo")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.undo: list[dict[Any, Any]] = [{} for _ in range(PARTS)]
        self.later: Cut | None = None
        self.open = True

    def overlay(self, part: int) -> dict[Any, Any]:
        """Return the old values of a part since this cut; those of older logs win."""
        merged: dict[Any, Any] = {}
        cut: Cut | None = self
        while cut is not None:
            later = cut.later
            held = cut.undo[part].copy()
            merged = {**held, **merged} if held and merged else merged or held
            cut = later
        return merged

    def find(self, part: int, address: Any, live: Any) -> Any:
        """Return the value of one address at the cut; `live` must have been read before this call."""
        cut: Cut | None = self
        while cut is not None:
            later = cut.later
            if address in (undo := cut.undo[part]):
                return undo[address]
            cut = later
        return live


class _Unasked(set[Any]):
    """A set that stays empty. Before the first cut no delta can be asked for, and where no cut is ever
    taken, keys that come and go would be remembered for ever.
    """

    def add(self, element: Any) -> None:
        pass

    def update(self, *others: Any) -> None:
        pass


class Changes:
    """The cuts of one table, and what changed between them. Methods run in the mailbox.

    Attributes:
        active: False until the first cut: a writer may then leave the rest undone.
        dirty: the addresses written since the newest cut, if there was one. A writer must add to it.
        newest: the newest cut if any is open. A writer must first store the old value in its log, except of
            an address in `dirty`, which has it there.
        epoch: the number of the newest cut; 0: there was none.
        rebase: True if deltas cannot build on the restored state, until a first checkpoint is complete.
    """

    __slots__ = (
        "_grew",
        "_joined",
        "_known_since",
        "_logged",
        "_open",
        "_sealed",
        "active",
        "dirty",
        "epoch",
        "newest",
        "rebase",
    )

    def __init__(self) -> None:
        self.active = False
        self.dirty: set[Any] = _Unasked()
        self.newest: Cut | None = None
        self.epoch = 0
        self._sealed: dict[int, set[Any]] = {}
        self._open: list[Cut] = []
        self._known_since = 1
        self.rebase = False
        self._logged = 0
        self._joined = False
        """True if the newest log has values from before the newest cut that was counted."""
        self._grew: Callable[[], None] | None = None

    def restored(self, *, rebase: bool = False) -> None:
        """Let the present state stand for cut number 1; `rebase`: its shape is not the stored one."""
        self.active = True
        self.dirty = set()
        self.epoch = self._known_since = 1
        self.rebase = rebase

    def cut(self) -> Cut:
        """Open a cut of the state as it is now."""
        self.active = True
        self.epoch += 1
        self._sealed[self.epoch] = self.dirty
        self.dirty = set()
        if len(self._sealed) > _SEALED_MAX:
            self._join_oldest()
        return self._opened(Cut(self.epoch))

    def keep(self, grew: Callable[[], None]) -> Cut:
        """Open a cut to which the table can go back later. It is none of those that are counted.

        `grew` is called now and then while old values come into its log.
        """
        self.active, self._grew = True, grew
        return self._opened(Cut(self.epoch))

    def _opened(self, cut: Cut) -> Cut:
        self._open = [cut for cut in self._open if cut.open]
        if self._open:
            assert self.newest is not None
            self.newest.later = cut
        self.newest, self._joined = cut, False
        self._open.append(cut)
        return cut

    def _join_oldest(self) -> None:
        """Join the changes of the two oldest epochs into one set, that of the later, as no confirmation
        comes.
        """
        first, second = sorted(self._sealed)[:2]
        # This makes a new set, as a thread may be reading the old one; and in this order, as the thread
        # must find one of the two.
        self._sealed[second] = self._sealed[first] | self._sealed[second]
        del self._sealed[first]

    def log(self, part: int, address: Any, old: Any) -> None:
        """Store the value of an address before it is overwritten; only while `newest` is set."""
        if self.logs:
            assert self.newest is not None
            self.newest.undo[part].setdefault(address, old)
            self._look(1)

    @property
    def logs(self) -> bool:
        """True while a cut is open, so that old values must be stored."""
        for cut in self._open:
            if cut.open:
                return True
        self._open, self.newest = [], None
        return False

    def log_all(self, part: int, old: dict[Any, Any]) -> None:
        """Store the values of addresses that are not in `dirty`; only while `logs`."""
        assert self.newest is not None
        undo = self.newest.undo[part]
        if self._joined:
            old = {address: held for address, held in old.items() if address not in undo}
        undo.update(old)
        self._look(len(old))

    def _look(self, logged: int) -> None:
        """Count values that were stored; now and then their memory is looked at."""
        if self._grew is not None:
            self._logged += logged
            if self._logged >= LOOK_EVERY:
                self._logged = 0
                self._grew()

    def close(self, cut: Cut) -> None:
        """Close a cut to which the table will not go back."""
        cut.open = False
        self._open = [cut for cut in self._open if cut.open]
        if not self._open:
            self.newest = None

    def join_closed(self, first: Cut) -> None:
        """Join the logs of closed cuts to those in front of them, from `first` on, so that they are few."""
        cut = first
        while (later := cut.later) is not None:
            if later.open:
                cut = later
                continue
            # In this order: a thread that reads an earlier cut finds each value in one of the two logs.
            for mine, others in zip(cut.undo, later.undo, strict=True):
                for address, held in others.items():
                    mine.setdefault(address, held)
            cut.later = later.later
            if self.newest is later:
                self.newest, self._joined = cut, True

    def changed(self, since: int, cut: Cut) -> Iterator[set[Any]]:
        """Return sets of addresses: all that changed after cut number `since` and up to `cut`, perhaps
        more.

        Runs in a thread. Raises InternalError if the changes are no longer known.
        """
        sealed = self._sealed.copy()
        if since < self._known_since:
            raise InternalError(
                f"changes since cut `{since}` are forgotten; known since `{self._known_since}`"
            )
        # The set of the cut may have been joined to that of the next one.
        last = min((epoch for epoch in sealed if epoch >= cut.epoch), default=cut.epoch)
        return (sealed[epoch] for epoch in sorted(sealed) if since < epoch <= last)

    def confirm(self, oldest: int) -> None:
        """Forget changes that are no longer needed: no delta will begin before cut number `oldest`."""
        self.rebase = False
        self._known_since = max(self._known_since, oldest)
        for epoch in [epoch for epoch in self._sealed if epoch <= oldest]:
            del self._sealed[epoch]
