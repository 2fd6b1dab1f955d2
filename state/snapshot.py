"""The state that an operator hands over at a barrier, and gets back after a restore.

State has one of three shapes:

* **tables**: keyed state, one Arrow table per state name. The first column is `key_group` (int32) and
  rows are sorted by it, so that a rescaled subtask reads only the ranges it owns.
* **files**: keyed state that already lies in immutable local files (sorted runs, RocksDB's SST files);
  they are uploaded as they are, each once.
* **items**: operator state, per state name a list of opaque, redistributable byte strings.

A cut is taken in the mailbox and must be cheap. Its content is read later, in a thread, while the
operator goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import msgspec
import pyarrow as pa

from .sealed import Record

KEY_GROUP_COLUMN = "key_group"
DELETED_COLUMN = "deleted"
"""A column of deltas only. It is true in the rows of deleted keys, whose value columns mean nothing."""

Redistribution: TypeAlias = Literal["split", "union", "broadcast"]
"""The distribution of items after a restore: `split` gives each item to one subtask, `union` gives all
items to every subtask. `broadcast` items are the same in all subtasks, and each gets one copy of the
list.
"""


class TableCut(msgspec.Struct):
    """A consistent cut of one table of keyed state.

    Attributes:
        make: builds the rows as they were at the cut, sorted by key group: those changed or deleted after
            the table's cut number `since`, or all rows if `since` is None (then without deleted ones).
            Runs once, in a thread. If it raises, the checkpoint is declined and the job goes on.
        keys: the columns that identify a row; a later row replaces an earlier one of equal keys.
        epoch: the number of this cut: 1, 2, ... per table, and 1 stands for the restored state itself, so
            the first cut of a restored table is number 2. 0: the table knows no deltas, `make` is only
            asked for everything.
        discard: called once instead of `make`, in the mailbox or in a thread, if `make` will not be called.
        confirm: called in the mailbox when a checkpoint has completed, with the number of the oldest cut
            that a later `make` may still name as `since`; marks of earlier deletions can be dropped.
    """

    make: Callable[[int | None], pa.Table]
    keys: tuple[str, ...] = ()
    epoch: int = 0
    discard: Callable[[], None] | None = None
    confirm: Callable[[int], None] | None = None


class ItemsCut(msgspec.Struct):
    """Operator state: the items, or a function that makes them once, in a thread."""

    items: list[bytes] | Callable[[], list[bytes]]
    redistribution: Redistribution = "split"


class LocalFile(msgspec.Struct, frozen=True):
    """An immutable file on this machine that is part of a table's state.

    `id` names its content for ever: no two files of this operator's state, in any subtask or attempt,
    share one unless their bytes are equal.
    """

    id: str
    path: Path
    rows: int
    first_key_group: int
    last_key_group: int


class CollectedFiles(msgspec.Struct, frozen=True):
    """The content of a `FilesCut`. `meta` says how the files belong together; opaque, and small."""

    files: list[LocalFile]
    meta: bytes


class FilesCut(msgspec.Struct):
    """A consistent cut of keyed state that lies in local files.

    Attributes:
        collect: seals the cut (by a flush or hard links) and returns its files. Runs once, in a thread.
        tables: the content of the cut as tables in the order of key groups, for canonical savepoints;
            runs in a thread, before `release`, instead of or after `collect`.
        keys: the columns that identify a row of `tables`.
        release: called once, in a thread, when the files are no longer needed (uploaded or given up).
    """

    collect: Callable[[], CollectedFiles]
    tables: Callable[[], Iterator[pa.Table]]
    keys: tuple[str, ...]
    release: Callable[[], None]


class StateSnapshot(msgspec.Struct):
    """The synchronous part of one operator's snapshot, by state name."""

    tables: dict[str, TableCut] = msgspec.field(default_factory=dict)
    items: dict[str, ItemsCut] = msgspec.field(default_factory=dict)
    files: dict[str, FilesCut] = msgspec.field(default_factory=dict)


class RestoredFiles(msgspec.Struct, frozen=True):
    """The downloaded files of one subtask's `FilesCut`; only those with key groups of the restoring
    subtask.

    `files` maps the id of a file to its local path. The files are deleted once the operator is restored,
    so it must move or link the files that it keeps. The key groups are those of the subtask that wrote
    the files: rows outside the restoring subtask's own range must be left out.
    """

    meta: bytes
    files: dict[str, Path]
    first_key_group: int
    last_key_group: int


class KeptState(msgspec.Struct, frozen=True):
    """A state of an operator subtask that has ended, which is still in memory.

    Attributes:
        checkpoints: those to which it can go back.
        content: what the table of the next attempt takes over. Nobody else may look into it.
    """

    checkpoints: frozenset[int]
    content: Any


class RestoredState(msgspec.Struct):
    """The restored state of one operator subtask: its own key groups, and its own share of the items.

    Tables are merged from base and deltas and have one row per key. `states` has the declaration of each
    state at the time of the checkpoint, as `Operator.states` returned it. A state in `kept` is in none of
    the others: it is taken over from the subtask of the attempt before, and goes back to `checkpoint_id`.
    """

    tables: dict[str, pa.Table] = msgspec.field(default_factory=dict)
    items: dict[str, list[bytes]] = msgspec.field(default_factory=dict)
    files: dict[str, list[RestoredFiles]] = msgspec.field(default_factory=dict)
    states: dict[str, StateInfo] = msgspec.field(default_factory=dict)
    kept: dict[str, KeptState] = msgspec.field(default_factory=dict)
    checkpoint_id: int = 0

    @property
    def empty(self) -> bool:
        """True if nothing was restored."""
        return not (self.tables or self.items or self.files or self.kept)


HINT: Final = "hint"
"""The kind of items that every subtask gets back, and whose loss does no harm."""


class StateInfo(Record, frozen=True, kw_only=True, gc=False):
    """The declaration of a state by its operator: for inspection, checks and evolution.

    `schema` is the Arrow IPC message of the schema of its canonical table (None: the state consists of
    items, or the schema is not known before records come). `version` is the user's; see `migrate` of a
    descriptor.
    """

    name: str
    kind: str
    """`value list map reducing aggregating timers window running reduce join in-flight split union
    broadcast hint`."""
    schema: bytes | None = None
    keys: tuple[str, ...] = ()
    version: int = 1
    ttl_ms: int | None = None

    def arrow_schema(self) -> pa.Schema | None:
        """Return the schema of the state's table."""
        return None if self.schema is None else pa.ipc.read_schema(pa.py_buffer(self.schema))


def state_info(
    name: str,
    kind: str,
    schema: pa.Schema | None = None,
    keys: tuple[str, ...] = (),
    *,
    version: int = 1,
    ttl_ms: int | None = None,
) -> StateInfo:
    """Return a StateInfo with its schema encoded."""
    encoded = None if schema is None else schema.serialize().to_pybytes()
    return StateInfo(
        name=name, kind=kind, schema=encoded, keys=keys, version=version, ttl_ms=ttl_ms
    )


MANY: Final = -1
"""The index of the other end in the address of a pack, which has records of many channels."""


class ChannelAddress(Record, frozen=True, kw_only=True, gc=False):
    """A channel between two subtasks, named so that the name is valid in later attempts too.

    All channels of a subtask in one exchange are named by one address as well: the index of the other end
    is `MANY`.

    Attributes:
        source: the sending operator.
        side: the side output of the sender that the channel carries; empty: the main output.
        target: the receiving operator, which is the head of its chain.
        input_index: the number of the receiver's input.
        sender: the index of the sending subtask.
        receiver: the index of the receiving subtask.
    """

    source: str
    side: str
    target: str
    input_index: int
    sender: int
    receiver: int

    @property
    def exchange(self) -> ChannelAddress:
        """The part of the name that is the same for all channels between two steps."""
        return msgspec.structs.replace(self, sender=0, receiver=0)


HANDLE_KINDS: Final = frozenset({"table", "delta", "items", "file", "meta", "input", "output"})
"""The possible values of `StateHandle.kind`."""


class StateHandle(Record, frozen=True, kw_only=True, gc=False):
    """The place of one piece of state of one subtask: inline in the manifest, or in a file.

    `file` is relative to the root of the job's storage, or of the savepoint. `checksum` is xxh3-64 of
    the bytes, in hex. The tables of one state and subtask are in order: the first has all rows, the
    others (deltas) what changed since the one before.
    """

    state: str
    kind: str
    """`table` (Parquet), `delta` (Parquet), `items` (a msgpack list of byte strings), `file` (opaque,
    one of a FilesCut), `meta` (of a FilesCut), or `input` and `output`: records that were on their way
    when a barrier overtook them, at the receiver and at the sender."""
    size_bytes: int
    checksum: str
    rows: int
    inline: bytes | None = None
    file: str | None = None
    first_key_group: int = 0
    last_key_group: int = -1
    keys: tuple[str, ...] = ()
    """For tables and deltas: the columns that identify a row."""
    redistribution: Redistribution = "split"
    """For items: how they are distributed after a restore."""
    file_id: str = ""
    """For files: their `LocalFile.id`."""
    footer: tuple[int, str] | None = None
    """For tables and deltas in files, and packs of in-flight records: size and checksum of the footer at
    the end, by which a part can be read and verified alone. That of a table is the one of Parquet.
    """
    channel: ChannelAddress | None = None
    """For in-flight records: their channel, or all channels of this subtask in one exchange, which the
    footer lists. Up to format 7 each channel had a handle.
    """
    offset: int = 0
    """The position of the piece in its file, if it shares it: in-flight records, and small state."""


class OperatorSnapshot(Record, frozen=True, kw_only=True, gc=False):
    """All state of one operator subtask in one checkpoint."""

    operator: str
    """The operator's name: the address of its state, stable over code changes."""
    handles: tuple[StateHandle, ...]
    states: tuple[StateInfo, ...] = ()


class CommitPermit(msgspec.Struct, frozen=True):
    """Proof that a checkpoint is durable. Without one nothing is committed to external systems.

    Issued by the coordinator only, after the checkpoint is in the job log. `checkpoint_id` is the
    highest durable one: everything pre-committed for it or before may, and must, be committed.
    """

    job_name: str
    generation: int
    checkpoint_id: int
