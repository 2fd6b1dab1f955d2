"""A savepoint, or a checkpoint, as states that can be read one by one, and a table that describes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from ...errors import StateError
from ...operators.clock import SystemClock
from ...operators.suggestions import suggest
from ...state.evolution import LAST_USED_COLUMN
from ...state.keyed.canonical import ENTRY_COLUMNS, NAMESPACE_COLUMN
from ...state.keygroups import KeyGroupRange
from ...state.snapshot import KEY_GROUP_COLUMN, StateHandle, StateInfo
from ..savepoint.describe import describe, states_of
from ..savepoint.locate import StoredSnapshot, locate
from ..storage.open_store import open_store_at
from ..task.concurrency import run_blocking

PER_KEY: Final = frozenset({"value", "list", "map", "reducing", "aggregating", "timers"})
"""Kinds whose identity is the key, and the namespace and entry key if there are any."""
WHOLE_KEY: Final = frozenset({"reduce", "running"})
"""Kinds whose identity is the key."""
WINDOW_COLUMNS: Final = ("window_start", "window_end")
_TEXTS: Final = pa.map_(pa.string(), pa.string())
METADATA_SCHEMA: Final = pa.schema(
    [
        ("operator", pa.string()),
        ("state", pa.string()),
        ("kind", pa.string()),
        ("stored_as", pa.string()),
        ("key_columns", _TEXTS),
        ("value_columns", _TEXTS),
        ("rows", pa.int64()),
        ("bytes", pa.int64()),
        ("first_key_group", pa.int32()),
        ("last_key_group", pa.int32()),
        ("version", pa.int32()),
        ("ttl_ms", pa.int64()),
        ("parallelism", pa.int32()),
        ("max_parallelism", pa.int32()),
        ("job", pa.string()),
        ("checkpoint_id", pa.int64()),
        ("format", pa.string()),
        ("created", pa.timestamp("us", tz="UTC")),
        ("path", pa.string()),
    ]
)
"""`rows` of a checkpoint counts each row as often as it was written: base and deltas."""


@dataclass(frozen=True, slots=True)
class StatePiece:
    """The part of a state that one old subtask has.

    Attributes:
        subtask: its index.
        handles: tables in order (a base, then deltas), or a meta and files, or items.
    """

    subtask: int
    handles: tuple[StateHandle, ...]

    @property
    def native(self) -> bool:
        """True if it lies in files of a state backend."""
        return any(handle.kind == "meta" for handle in self.handles)

    def overlaps(self, groups: KeyGroupRange) -> bool:
        """True if it may have rows of these key groups."""
        return any(
            KeyGroupRange(handle.first_key_group, handle.last_key_group).overlaps(groups)
            for handle in self.handles
        )


@dataclass(frozen=True, slots=True)
class StoredState:
    """One state of one operator: its description, and the places of its pieces.

    Attributes:
        root: address of the directory that names of files are relative to.
        info: what the operator said of it; None: nothing but that it exists.
        pieces: by subtask.
        max_parallelism: the number of key groups.
    """

    root: str
    operator: str
    name: str
    info: StateInfo | None
    pieces: tuple[StatePiece, ...]
    parallelism: int
    max_parallelism: int

    @property
    def keyed(self) -> bool:
        """True for tables, false for items of subtasks."""
        return any(handle.kind != "items" for piece in self.pieces for handle in piece.handles)

    @property
    def kind(self) -> str:
        """The kind it was declared as, or how its items are dealt out."""
        if self.info is not None:
            return self.info.kind
        return self.pieces[0].handles[0].redistribution if not self.keyed else "table"

    @property
    def schema(self) -> pa.Schema | None:
        """The columns of its table as declared; None: not known without its files, or opaque items."""
        return None if self.info is None else self.info.arrow_schema()

    @property
    def identity(self) -> tuple[str, ...]:
        """The columns that tell its rows apart."""
        if self.info is not None and self.info.keys:
            return self.info.keys
        handles = [handle for piece in self.pieces for handle in piece.handles]
        return next((handle.keys for handle in handles if handle.keys), ())

    @property
    def hash_columns(self) -> tuple[str, ...] | None:
        """The columns of the key, of which the key group follows; None: it does not follow from columns."""
        return hash_columns_of(self.kind, self.identity)

    @property
    def entry_column(self) -> str | None:
        """The column of the entry key of a list, a map or timers."""
        return ENTRY_COLUMNS.get(self.kind)

    @property
    def has_ttl(self) -> bool:
        """True if its rows say when they were last used."""
        schema = self.schema
        return schema is not None and LAST_USED_COLUMN in schema.names

    @property
    def size_bytes(self) -> int:
        """Bytes of all its pieces."""
        return sum(handle.size_bytes for piece in self.pieces for handle in piece.handles)

    @property
    def rows(self) -> int:
        """Rows as written: of a checkpoint, those of bases and deltas."""
        return sum(handle.rows for piece in self.pieces for handle in piece.handles)

    @property
    def text(self) -> str:
        """The name of the snapshot in errors."""
        return f"operator=`{self.operator}` state=`{self.name}`"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A savepoint or checkpoint that was found.

    Attributes:
        located: its manifest, and where it is.
        options: what its storage needs, such as `s3.endpoint`.
    """

    located: StoredSnapshot
    options: Mapping[str, str]

    def states(self) -> Iterator[StoredState]:
        """All states, in the order of operators and names."""
        manifest = self.located.manifest
        for operator in manifest.operators:
            for name, info in states_of(operator).items():
                pieces = []
                for subtask in operator.subtasks:
                    found = tuple(
                        handle
                        for handle in subtask.handles()
                        if handle.state == name and handle.channel is None
                    )
                    if found:
                        pieces.append(StatePiece(subtask.subtask, found))
                yield StoredState(
                    self.located.root,
                    operator.name,
                    name,
                    info,
                    tuple(pieces),
                    operator.parallelism,
                    manifest.max_parallelism,
                )

    def state(self, operator: str, state: str) -> StoredState:
        """One state.

        Raises:
            StateError: there is none of that name; says which there are.
        """
        known: dict[str, dict[str, StoredState]] = {
            one.name: {} for one in self.located.manifest.operators
        }
        for found in self.states():
            known[found.operator][found.name] = found
        if operator not in known:
            raise _unknown("operator", operator, list(known), self.located)
        if state not in known[operator]:
            raise _unknown(
                f"state of operator `{operator}`", state, list(known[operator]), self.located
            )
        return known[operator][state]


def hash_columns_of(kind: str, identity: tuple[str, ...]) -> tuple[str, ...] | None:
    """The columns of the key in tables of a kind; None: key groups do not follow from columns."""
    if KEY_GROUP_COLUMN in identity:
        return None
    if kind in PER_KEY:
        others = (NAMESPACE_COLUMN, ENTRY_COLUMNS.get(kind))
        return tuple(name for name in identity if name not in others)
    if kind == "window":
        return tuple(name for name in identity if name not in WINDOW_COLUMNS)
    return identity if kind in WHOLE_KEY else None


def open_snapshot(address: str, options: Mapping[str, str]) -> Snapshot:
    """The snapshot at `address`: a savepoint, or a job's checkpoints, of which the newest counts, or `@7`.

    Raises:
        StateError: neither is there.
        UsageError: the address is not understood.
    """
    located = run_blocking(locate(open_store_at, address, options, SystemClock()))
    return Snapshot(located, dict(options))


def _unknown(what: str, name: str, known: list[str], located: StoredSnapshot) -> StateError:
    return StateError(
        f"no such {what} name=`{name}`",
        where=located.text,
        fix=suggest(name, known, "there are"),
    )


def unreadable(state: StoredState) -> StateError:
    """The error for state that only its backend can read."""
    return StateError(
        f"the state lies in files that only its backend reads {state.text} kind=`{state.kind}`",
        where=state.root,
        fix="take a canonical savepoint (without --native), and read that",
    )


def metadata_table(snapshot: Snapshot) -> pa.Table:
    """A row per state, in the order of operators and names."""
    found = describe(snapshot.located)
    rows = [
        _row(found, operator, state)
        for operator in found["operators"]
        for state in operator["states"]
    ]
    return pa.Table.from_pylist(rows, METADATA_SCHEMA)


def _row(found: dict[str, Any], operator: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    first, last = state["key_groups"] or (None, None)
    return {
        **{name: state[name] for name in ("state", "kind", "stored_as", "rows", "bytes")},
        **{name: state[name] for name in ("version", "ttl_ms", "max_parallelism")},
        "operator": operator["operator"],
        "parallelism": operator["parallelism"],
        "key_columns": list(state["keys"].items()),
        "value_columns": list(state["values"].items()),
        "first_key_group": first,
        "last_key_group": last,
        "job": found["job"],
        "checkpoint_id": found["id"],
        "format": found["format"],
        "created": found["created_ms"] * 1000,
        "path": found["path"],
    }
