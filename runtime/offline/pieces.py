"""Tables of a new savepoint, one file per state and subtask. Any number of processes write them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa

from ...state.keygroups import key_group_range
from ...state.snapshot import StateHandle
from ..protocol import names
from ..task.parquet_files import encode_tables
from .files import OpenStore
from .rewrite import rewritten
from .snapshot import StoredState

INLINE_BYTES_MAX: Final = 1 << 20
"""Items up to here lie in the metadata, as in the savepoints of jobs."""


@dataclass(frozen=True, slots=True)
class Goal:
    """The place where a new savepoint is written.

    Attributes:
        root: address of its directory.
        options: what the storage needs.
        max_parallelism: its number of key groups.
    """

    root: str
    options: Mapping[str, str]
    max_parallelism: int


@dataclass(frozen=True, slots=True)
class Written:
    """A file of a new savepoint: what it is for."""

    operator: str
    subtask: int
    handle: StateHandle


@dataclass(frozen=True, slots=True)
class CopyTask:
    """One state of one subtask to be taken over; plain data, carried out anywhere.

    Attributes:
        goal: where to.
        state: from where.
        options: what the storage of the base needs.
        subtask: of the new savepoint.
        parallelism: of the operator there.
    """

    goal: Goal
    state: StoredState
    options: Mapping[str, str]
    subtask: int
    parallelism: int

    def run(self, attempt: str) -> Written | None:
        """Write the file; None: no rows. Raises StateError as `rewritten`."""
        groups = key_group_range(self.subtask, self.parallelism, self.goal.max_parallelism)
        with (
            OpenStore(self.state.root, self.options) as base,
            OpenStore(self.goal.root, self.goal.options) as goal,
        ):
            tables = rewritten(self.state, groups, self.goal.max_parallelism, base)
            return write_table(
                goal, self.state.operator, self.subtask, self.state.name,
                self.state.identity, tables, attempt,
            )  # fmt: skip


def write_table(
    opened: OpenStore,
    operator: str,
    subtask: int,
    state: str,
    keys: tuple[str, ...],
    tables: Iterable[pa.Table],
    attempt: str,
) -> Written | None:
    """Write the rows of one state and subtask; None: there are none.

    Args:
        opened: the store of the new savepoint.
        operator: its name.
        subtask: its index.
        state: its name.
        keys: the columns that identify a row.
        tables: sorted by key group.
        attempt: part of the file's name; unique among all who may write this piece, so that one that
            was given up and goes on all the same changes no file of another.
    """
    with tempfile.TemporaryDirectory(prefix="headgate-") as directory:
        encoded = encode_tables(tables, lambda: Path(directory) / "table")
        if encoded is None:
            return None
        name = names.savepoint_file(operator, subtask, state, "table", attempt)
        opened.run(opened.store.write_file(name, encoded.data))
    handle = StateHandle(
        state=state,
        kind="table",
        size_bytes=encoded.size_bytes,
        checksum=encoded.checksum,
        rows=encoded.rows,
        file=name,
        first_key_group=encoded.first_key_group,
        last_key_group=encoded.last_key_group,
        keys=keys,
        footer=encoded.footer,
    )
    return Written(operator, subtask, handle)
