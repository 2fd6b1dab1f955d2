"""Decides what a cut of a table writes: everything (a base), or a delta, and how far back it reaches.

The files of one table of one subtask form a *chain*: a base with all rows, then deltas, each with what
changed since the cut before it. A new cut continues the chain of the completed checkpoint that its
barrier names:

* usually with one more delta;
* once the chain has `files_max` files, with a delta that reaches back over the newest few, which takes
  their place. Nothing is read for that: the table still knows what changed since an older cut. The delta
  reaches back over as few files as it takes for the delta before them to be at least as large as the new
  one. So a row is only ever rewritten into a delta of at least twice the size (the logarithmic method of
  Bentley and Saxe, 1980): at most log2(base / delta) times, and twice in all where 19 deltas of 1 % fit
  in;
* with a new base once the deltas together outweigh the old one, or when nothing is known.

With 1 % of the keys changed between checkpoints, drawn at random, and a chain of 20 files, that comes to
1.8 % of a base per checkpoint for deltas and their merges, and 0.9 % for new bases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

import msgspec

from .snapshot import StateHandle, StateInfo

RESTORED_EPOCH: Final = 1
"""A restored table stands for the cut of this number."""
PROBE_EVERY: Final = 8
"""One in eight of the bases that are written because the last delta outweighed one is a delta instead:
the table may have calmed down.
"""
_LIKE: Final = 1.25
"""A delta may be larger than the one before it by this factor and still leave it as it is."""

StateKey: TypeAlias = tuple[str, str]
"""Names of the operator and of its state."""


class ChainedFile(msgspec.Struct, frozen=True):
    """One file of a chain, and the number of the cut that it reaches; 0: no delta can begin behind it."""

    handle: StateHandle
    epoch: int


class Chain(msgspec.Struct, frozen=True):
    """A base and its deltas, oldest first; empty: nothing is known.

    Attributes:
        delta_rows: the rows of the newest plain delta. It is kept when a new base is written, as the next
            delta may be as large.
        bases_in_a_row: the number of bases written because of `delta_rows` without a delta in between.
    """

    links: tuple[ChainedFile, ...] = ()
    delta_rows: int = 0
    bases_in_a_row: int = 0

    @property
    def handles(self) -> tuple[StateHandle, ...]:
        """The files, base first."""
        return tuple(link.handle for link in self.links)

    def replace(self, change: Callable[[StateHandle], StateHandle]) -> Chain:
        """Return the same chain with the handles that `change` returns for its files."""
        links = tuple(ChainedFile(change(link.handle), link.epoch) for link in self.links)
        return msgspec.structs.replace(self, links=links)

    @property
    def oldest_epoch(self) -> int:
        """The oldest cut that a delta behind this chain may name; 0: none."""
        if not self.links or _too_small(self):
            return 0
        return next((link.epoch for link in self.links if link.epoch), 0)


class ChainPlan(msgspec.Struct, frozen=True):
    """Write what changed since the cut `since` (None: everything), behind the first `keep` files."""

    keep: int = 0
    since: int | None = None
    expected_too_large: bool = False
    """A base is written only because a delta is expected to outweigh it."""


def plan(chain: Chain, epoch: int, files_max: int) -> ChainPlan:
    """Decide how cut number `epoch` of a table continues `chain`.

    Args:
        chain: the chain of the completed checkpoint to build on.
        epoch: the number of the new cut; 0: the table knows no deltas.
        files_max: the greatest number of files in a chain, including the base.
    """
    links = chain.links
    if not links or not 0 < links[-1].epoch < epoch or _too_small(chain):
        return ChainPlan()
    base, deltas = links[0].handle, chain.handles[1:]
    # A table that lost all its rows gets here too: restored without rows, it counts its cuts from 1
    # again.
    rows = sum(delta.rows for delta in deltas)
    if rows >= base.rows or sum(delta.size_bytes for delta in deltas) >= base.size_bytes:
        return ChainPlan()
    if not deltas and chain.delta_rows >= base.rows and chain.bases_in_a_row < PROBE_EVERY - 1:
        return ChainPlan(expected_too_large=True)
    keep = len(links) if len(links) < files_max else _files_to_keep(links)
    return ChainPlan(keep, links[keep - 1].epoch) if keep else ChainPlan()


def _too_small(chain: Chain) -> bool:
    """A base that travels in the manifest is rewritten more cheaply than it is amended."""
    return chain.links[0].handle.file is None


def _files_to_keep(links: Sequence[ChainedFile]) -> int:
    """Return the number of files that stay when a full chain gets one more; 0: none stays."""
    merged_bytes = links[-1].handle.size_bytes  # the new delta, as large as the newest
    possible = 0
    for keep in range(len(links) - 1, 0, -1):
        merged_bytes += links[keep].handle.size_bytes
        if not links[keep - 1].epoch:
            break
        possible = keep
        if _LIKE * links[keep - 1].handle.size_bytes >= merged_bytes:
            break
    return possible


def extend(chain: Chain, planned: ChainPlan, handle: StateHandle | None, epoch: int) -> Chain:
    """Return the chain after `planned` has been carried out; `handle` is None if there was nothing to
    write.
    """
    if planned.since is None:
        again = chain.bases_in_a_row + 1 if planned.expected_too_large else 0
        return Chain(
            () if handle is None else (ChainedFile(handle, epoch),), chain.delta_rows, again
        )
    kept = chain.links[: planned.keep]
    plain = planned.keep == len(chain.links)
    if handle is None:
        links = (*kept[:-1], msgspec.structs.replace(kept[-1], epoch=epoch))
        return Chain(links, 0 if plain else chain.delta_rows)
    return Chain((*kept, ChainedFile(handle, epoch)), handle.rows if plain else chain.delta_rows)


def restored_chain(handles: Iterable[StateHandle]) -> Chain:
    """Return the chain of a restored table: a delta can begin only behind all of it."""
    tables = [handle for handle in handles if handle.kind in ("table", "delta")]
    epochs = [0] * (len(tables) - 1) + [RESTORED_EPOCH]
    links = tuple(ChainedFile(handle, epoch) for handle, epoch in zip(tables, epochs, strict=False))
    return Chain(links)


class Written(msgspec.Struct):
    """The files in the store that one checkpoint of a subtask consists of.

    Attributes:
        base: the id of the checkpoint it was built on.
        chains: the chains of its tables.
        files: for states in local files, the handle of each file by its id.
    """

    base: int = 0
    chains: dict[StateKey, Chain] = msgspec.field(default_factory=dict)
    files: dict[StateKey, dict[str, StateHandle]] = msgspec.field(default_factory=dict)

    def handles(self) -> Iterator[StateHandle]:
        """Yield the handles of all files."""
        for chain in self.chains.values():
            yield from chain.handles
        for files in self.files.values():
            yield from files.values()

    def replace(self, change: Callable[[StateHandle], StateHandle]) -> None:
        """Take the handles that `change` returns instead."""
        self.chains = {key: chain.replace(change) for key, chain in self.chains.items()}
        self.files = {
            key: {id_: change(handle) for id_, handle in files.items()}
            for key, files in self.files.items()
        }


class _Confirmation(msgspec.Struct):
    epoch: int
    confirm: Callable[[int], None]


class ChainBook:
    """The checkpoints of this attempt that a subtask can build on. It is bounded: it holds those that a
    barrier may still name (the newest completed one, the one that was built on, and all later ones).
    """

    def __init__(self) -> None:
        self._written: dict[int, Written] = {}
        self._confirmations: dict[int, dict[StateKey, _Confirmation]] = {}
        self._building: dict[int, int] = {}
        """The bases of checkpoints that are being written. Threads read them some time later."""

    def base(self, checkpoint_id: int) -> Written:
        """Return the files of the completed checkpoint that a barrier names; none if it is unknown here.

        Barriers name checkpoints in order, so older ones are forgotten.
        """
        if checkpoint_id:
            self._forget_before(checkpoint_id)
        return self.written(checkpoint_id)

    def written(self, checkpoint_id: int) -> Written:
        """Return the files of a checkpoint that was acknowledged or restored; none if it is unknown."""
        return self._written.get(checkpoint_id, Written())

    def taken(
        self,
        checkpoint_id: int,
        base: int,
        confirmations: Mapping[StateKey, tuple[int, Callable[[int], None]]],
    ) -> None:
        """Note that a cut was made and is now being written.

        Args:
            checkpoint_id: the checkpoint of the cut.
            base: the checkpoint that it builds on; 0: none.
            confirmations: for each table the number of its cut, and the function to call when the
                checkpoint is complete.
        """
        self._building[checkpoint_id] = base
        self._confirmations[checkpoint_id] = {
            key: _Confirmation(epoch, confirm) for key, (epoch, confirm) in confirmations.items()
        }

    def acknowledged(self, checkpoint_id: int, written: Written) -> None:
        """Note that everything is in the store and the checkpoint is being acknowledged."""
        self._written[checkpoint_id] = written
        self._building.pop(checkpoint_id, None)

    def forget(self, checkpoint_id: int) -> None:
        """Forget a checkpoint that was declined or aborted."""
        self._written.pop(checkpoint_id, None)
        self._confirmations.pop(checkpoint_id, None)
        self._building.pop(checkpoint_id, None)

    def completed(self, checkpoint_id: int) -> None:
        """Note that a checkpoint is durable, and let each table know which of its cuts may still be
        named.
        """
        written = self._written.get(checkpoint_id)
        if written is not None:
            self._forget_before(written.base or checkpoint_id)
        confirmations = self._confirmations.get(checkpoint_id, {})
        for key, confirmation in confirmations.items():
            confirmation.confirm(self._oldest_epoch(key) or confirmation.epoch)
        for id_ in [id_ for id_ in self._confirmations if id_ <= checkpoint_id]:
            del self._confirmations[id_]

    def _forget_before(self, checkpoint_id: int) -> None:
        oldest = min([checkpoint_id, *(base for base in self._building.values() if base)])
        for id_ in [id_ for id_ in self._written if id_ < oldest]:
            del self._written[id_]

    def _oldest_epoch(self, key: StateKey) -> int:
        chains = (written.chains.get(key, Chain()) for written in self._written.values())
        return min((chain.oldest_epoch for chain in chains if chain.oldest_epoch), default=0)


def may_continue(old: StateInfo | None, new: StateInfo | None) -> bool:
    """Return True if rows of a state declared as `old` need no adaptation for one declared as `new`."""
    if old is None or new is None:
        return old is new
    if (old.kind, old.version, old.keys) != (new.kind, new.version, new.keys):
        return False
    before, after = old.arrow_schema(), new.arrow_schema()
    return before is after if before is None or after is None else bool(before.equals(after))
