"""Decides which splits that were found while a job runs a subtask of the source reads.

The coordinator looks for splits at intervals and *offers* all that exist to all subtasks of the source. It
stores nothing, and offers may be late, repeated, lost, incomplete, or those of a coordinator that has been
replaced. Each subtask has a *ledger* that takes a split from an offer if two things hold:

* **The subtask is its owner.** The owner follows from the key of the split and the parallelism, so it is
  the same for all ledgers of an attempt, whichever checkpoint they began with: the subtasks of a region
  that was restarted alone begin with a newer one. So no two subtasks take one split.
* **No subtask of the job has ever taken it.** The owner knows that, because the ledgers of all subtasks
  together have the key of every split, also of those that have ended. After a restore each ledger begins
  with the keys of all of them, at any parallelism, and keeps those that its subtask owns.

A ledger is part of the same cut as the positions of the reader. So a split whose key is in a checkpoint has
its position in that checkpoint, or had been read to its end. A split that was taken after the newest
checkpoint is in neither, and neither is the effect of its records: after a failure it is offered and taken
again, and read from its beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final, final

import msgspec

KNOWN_SPLITS: Final = "known-splits"
"""The name of the operator state with the keys of a ledger."""


class LedgerStart(msgspec.Struct, frozen=True):
    """The start of a subtask's ledger, beside the keys in its restored state.

    Attributes:
        known: the keys of all splits that any subtask of the source begins with.
        parallelism: the number of subtasks, each of which owns splits.
        enabled: splits are looked for, so a subtask without splits waits for some.
    """

    known: tuple[str, ...]
    parallelism: int
    enabled: bool = True


@final
class SplitLedger:
    """The keys of all splits that a subtask owns and that have been handed out, to itself or to others.

    A split that the subtask owns may be read by another one: splits of the first start, and those of a
    checkpoint of another parallelism, are dealt out evenly.
    """

    def __init__(self, index: int, start: LedgerStart, share: Callable[[str], int]) -> None:
        """Make a ledger.

        Args:
            index: the index of the subtask.
            start: the known splits, and the number of subtasks among which the owner is chosen.
            share: returns a number that decides the owner, always the same one for a key.
        """
        self._index = index
        self._parallelism = start.parallelism
        self._share = share
        self._known: dict[str, None] = {}
        self.add_known(start.known)

    def owns(self, key: str) -> bool:
        """Return True if this subtask is the owner of a split."""
        return self._share(key) % self._parallelism == self._index

    def add_known(self, keys: Iterable[str]) -> None:
        """Add splits that are known already; call this before the first offer."""
        self._known.update((key, None) for key in keys if self.owns(key))

    def offer(self, splits: Mapping[str, bytes]) -> list[bytes]:
        """Return those of the offered splits, given by key, that the subtask has to read now."""
        taken = []
        for key, split in splits.items():
            if key not in self._known and self.owns(key):
                self._known[key] = None
                taken.append(split)
        return taken

    @property
    def known(self) -> list[str]:
        """The keys, for the snapshot, in the order in which they became known."""
        return list(self._known)
