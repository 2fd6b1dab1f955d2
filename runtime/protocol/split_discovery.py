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

A split with parents is not offered before all of them have ended *for good*: a checkpoint is complete at
which they had ended. Each subtask knows that of the splits that it has read, and of those that it owns and
that had ended at the restored checkpoint, and reports it while the coordinator awaits them. So no failure
takes a parent back while a child is being read. If barriers are aligned, every subtask of the
job has processed all records of the parents by then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
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
        checkpoints: the job takes checkpoints, so a split ends for good with one of them.
    """

    known: tuple[str, ...]
    parallelism: int
    enabled: bool = True
    checkpoints: bool = True


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


@final
class EndedSplits:
    """The splits of a subtask that have ended for good, for a source whose splits have parents."""

    def __init__(self, start: LedgerStart) -> None:
        self._start = start
        self._ended: set[str] = set()
        self._reading: set[str] = set()
        """The splits that the reader was given, without those that have ended for good."""
        self._cuts: dict[int, set[str]] = {}
        """The splits that had ended at a checkpoint, by its number."""

    def restore(self, known: Iterable[str]) -> None:
        """Note the keys in the restored state: splits without a position had ended."""
        self._ended.update(set(known).difference(self._start.known))

    def begun(self, keys: Iterable[str]) -> None:
        """Note that the reader was given splits."""
        self._reading.update(keys)

    def cut(self, checkpoint_id: int, going_on: Collection[str]) -> None:
        """Note the splits that the reader has positions of, at a checkpoint."""
        self._cuts[checkpoint_id] = self._reading.difference(going_on)

    def completed(self, checkpoint_id: int) -> None:
        """Note that a checkpoint is complete. A notice may be lost, so it stands for those before it."""
        for id_ in [id_ for id_ in self._cuts if id_ <= checkpoint_id]:
            self._ended |= self._cuts.pop(id_)
        self._reading -= self._ended

    def aborted(self, checkpoint_id: int) -> None:
        """Note that a checkpoint was aborted."""
        self._cuts.pop(checkpoint_id, None)

    def among(
        self, keys: Iterable[str], going_on: Callable[[], Collection[str]]
    ) -> tuple[str, ...]:
        """Return those of `keys` that have ended; `going_on` returns the splits with positions now."""
        ended = self._ended
        if not self._start.checkpoints:
            ended = ended | self._reading.difference(going_on())
        return tuple(key for key in keys if key in ended)


def ready_splits(
    found: Mapping[str, bytes], parents: Mapping[str, Collection[str]], ended: Collection[str]
) -> tuple[dict[str, bytes], list[str]]:
    """Return the splits that may be offered, and those whose end is of interest.

    Args:
        found: all splits that exist, by key.
        parents: the keys of their parents, for those that have some.
        ended: the splits that have ended for good, as far as subtasks have reported it.
    """
    awaited = sorted(
        {parent for key in found for parent in parents.get(key, ()) if parent in found}
    )
    going_on = set(awaited).difference(ended)
    ready = {
        key: split for key, split in found.items() if going_on.isdisjoint(parents.get(key, ()))
    }
    return ready, awaited
