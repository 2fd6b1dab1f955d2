"""What an operator hands over at a barrier, and gets back after a restore.

Two shapes of state (features.md STA-01, STA-02):

* **tables**: keyed state, one Arrow table per state name. The first column is `key_group` (int32) and
  rows are sorted by it, so that a rescaled subtask reads only the ranges it owns.
* **items**: operator state, per state name a list of opaque, redistributable byte strings
  (mode *split*: each item goes to exactly one subtask after a rescale).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import pyarrow as pa

KEY_GROUP_COLUMN = "key_group"


@dataclass(slots=True)
class StateSnapshot:
    """The synchronous part of one operator's snapshot.

    `tables` maps a state name to a function that builds its table; `items` maps one to its byte
    strings, or to a function that makes them. Functions run later, once, in a thread, while the
    operator goes on: they must only touch what the synchronous part froze or handed over. If one
    raises, the checkpoint is declined and the job goes on.
    """

    tables: dict[str, Callable[[], pa.Table]] = field(default_factory=dict)
    items: dict[str, list[bytes] | Callable[[], list[bytes]]] = field(default_factory=dict)


@dataclass(slots=True)
class RestoredState:
    """State of one operator subtask as restored: own key groups, own share of the items."""

    tables: dict[str, pa.Table] = field(default_factory=dict)
    items: dict[str, list[bytes]] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        """True if nothing at all was restored."""
        return not self.tables and not self.items


class StateHandle(msgspec.Struct, frozen=True, kw_only=True):
    """Where one piece of state of one subtask lies: inline in the manifest, or in a file.

    `file` is relative to the job's storage root. `checksum` is xxh3-64 of the bytes, in hex.
    """

    state: str
    kind: str
    """`table` (a Parquet file) or `items` (a msgpack list of byte strings)."""
    size_bytes: int
    checksum: str
    rows: int
    inline: bytes | None = None
    file: str | None = None
    first_key_group: int = 0
    last_key_group: int = -1


class OperatorSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All state of one operator subtask in one checkpoint."""

    operator: str
    """The operator's name: the address of its state, stable over code changes."""
    handles: tuple[StateHandle, ...]


@dataclass(frozen=True, slots=True)
class CommitPermit:
    """Proof that a checkpoint is durable: without one nothing is committed to the outside.

    Issued by the coordinator only, after the checkpoint is in the job log. `checkpoint_id` is the
    highest durable one: everything pre-committed for it or before may, and must, be committed.
    """

    job_name: str
    generation: int
    checkpoint_id: int
