"""Describes a savepoint or a checkpoint to a program or a notebook, without reading its state."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime

from ...operators.clock import SystemClock
from ...operators.notebook import html_columns, html_table
from ..storage.open_store import open_store_at
from .describe import describe
from .locate import locate

_TITLES = ("operator", "subtasks", "state", "kind", "key", "value", "rows", "bytes")


@dataclass(frozen=True, slots=True)
class SavedState:
    """One state of an operator.

    Attributes:
        operator: the name of the operator, which is the address of its state.
        parallelism: its number of subtasks when the state was saved.
        state: the name of the state.
        kind: such as `value`, `map`, `running` or `window`.
        keys: the key columns, with their types.
        values: the other columns, with their types.
        rows: the number of rows. An incremental checkpoint counts a row as often as it was written.
        size_bytes: the size of its files.
    """

    operator: str
    parallelism: int
    state: str
    kind: str
    keys: Mapping[str, str]
    values: Mapping[str, str]
    rows: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class SavepointInfo:
    """The content of a savepoint or a checkpoint, as `headgate savepoint inspect` prints it.

    Attributes:
        address: the directory in which it is.
        kind: `savepoint` or `checkpoint`.
        job: the job that it was taken of.
        checkpoint: its number.
        created_ms: when it was complete, in ms since the epoch.
        format: `canonical` (Parquet), `native` (files of the state backend) or `checkpoint`.
        size_bytes: the size of all files.
        key_groups: the number of key groups, which is the highest parallelism of a run that starts from it.
        states: all states, by operator.
    """

    address: str
    kind: str
    job: str
    checkpoint: int
    created_ms: int
    format: str
    size_bytes: int
    key_groups: int
    states: tuple[SavedState, ...]

    def _repr_html_(self) -> str:
        """Return its facts and its states as two tables, which notebooks show."""
        created = datetime.fromtimestamp(self.created_ms / 1000, UTC)
        facts = [
            ("address", self.address),
            ("created", f"{created:%Y-%m-%d %H:%M:%S} UTC"),
            ("format", self.format),
            ("bytes", f"{self.size_bytes:,}"),
            ("key groups", f"{self.key_groups:,}"),
        ]
        rows = [
            (
                each.operator,
                each.parallelism,
                each.state,
                each.kind,
                _columns(each.keys),
                _columns(each.values),
                f"{each.rows:,}",
                f"{each.size_bytes:,}",
            )
            for each in self.states
        ]
        caption = f"{self.kind.capitalize()} {self.checkpoint} of job {self.job}"
        return html_table(caption, facts) + html_columns("States", _TITLES, rows)


def inspect_savepoint(
    address: str | os.PathLike[str], *, options: Mapping[str, str] | None = None
) -> SavepointInfo:
    """Return a description of a savepoint or a checkpoint. Nothing is written, and no state is read.

    Args:
        address: the directory of a savepoint, or that of a job's checkpoints, of which the newest is
            shown; with `@7` behind it checkpoint 7.
        options: those of the storage, such as `{"s3.endpoint": "http://..."}`.

    Raises:
        StateError: there is no restorable state.
        UsageError: the address is malformed.
    """
    call = locate(open_store_at, os.fspath(address), options or {}, SystemClock())
    # A notebook has an event loop already, which cannot run another call in the same thread.
    with ThreadPoolExecutor(1) as thread:
        found = describe(thread.submit(asyncio.run, call).result())
    return SavepointInfo(
        address=found["path"],
        kind=found["kind"],
        job=found["job"],
        checkpoint=found["id"],
        created_ms=found["created_ms"],
        format=found["format"],
        size_bytes=found["bytes"],
        key_groups=found["max_parallelism"],
        states=tuple(
            SavedState(
                operator=operator["operator"],
                parallelism=operator["parallelism"],
                state=state["state"],
                kind=state["kind"],
                keys=state["keys"],
                values=state["values"],
                rows=state["rows"],
                size_bytes=state["bytes"],
            )
            for operator in found["operators"]
            for state in operator["states"]
        ),
    )


def _columns(types: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {type_}" for name, type_ in types.items())
