"""A sink that commits once per checkpoint for all its writers: into a table that is one file of JSON.

The table records, in the same rename that adds files of records, which checkpoint of which attempt it has.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headgate.errors import StorageError
from headgate.operators.elements import Batch, ColumnBatch, ObjectBatch
from headgate.operators.sink import GlobalCommit, Guarantee, Sink, SinkWriter

NO_MARKER = "adds the files again"


class TableSink(Sink):
    """Writes to the directory `place`. While it has a file `away`, the table does not answer."""

    guarantees = frozenset({Guarantee.EXACTLY_ONCE})
    guarantee = Guarantee.EXACTLY_ONCE
    commits_globally = True

    def __init__(self, place: Path, bug: str = "") -> None:
        self.directory = place
        self.bug = bug

    def writer(self) -> SinkWriter:
        return TableWriter(self.directory)

    def commit_globally(self, commit: GlobalCommit) -> None:
        with (self.directory / "calls").open("a") as calls:
            calls.write(f"{[epoch.checkpoint_id for epoch in commit.epochs]}\n")
        if (self.directory / "away").exists():
            raise StorageError("the table does not answer")
        with _locked(self.directory):
            table = read_table(self.directory)
            for epoch in commit.epochs:
                names = [name.decode() for name in epoch.committables]
                for attempt in sorted({_attempt_of(name) for name in names}):
                    newest = table["markers"].get(attempt, 0)
                    if epoch.checkpoint_id > newest or self.bug == NO_MARKER:
                        table["files"] += [name for name in names if _attempt_of(name) == attempt]
                        table["markers"][attempt] = epoch.checkpoint_id
            new = self.directory / "table.new"
            new.write_text(json.dumps(table))
            new.rename(self.directory / "table")


class TableWriter(SinkWriter):
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.records: list[Any] = []

    def write(self, batch: Batch) -> None:
        if isinstance(batch, ColumnBatch):
            self.records += batch.data.to_pylist()
        elif isinstance(batch, ObjectBatch):
            self.records += batch.records

    def roll(self, checkpoint_id: int) -> Callable[[], list[bytes]] | None:
        if not self.records:
            return None
        records, self.records = self.records, []
        context = self.context
        name = f"{context.run_id}|{context.attempt}-{checkpoint_id}-{context.subtask_index}"

        def draft() -> list[bytes]:
            (self.directory / f".{name}").write_text(json.dumps(records))
            return [name.encode()]

        return draft


def _attempt_of(name: str) -> str:
    """Return the run and the attempt that wrote a file."""
    return name.rsplit("-", 2)[0]


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    file = os.open(directory / "lock", os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def read_table(directory: Path) -> dict[str, Any]:
    """Return the present table: the names of its files, and the newest checkpoint by attempt."""
    file = directory / "table"
    return json.loads(file.read_text()) if file.exists() else {"files": [], "markers": {}}


def visible(directory: Path) -> list[Any]:
    """Return the records of all files of the table."""
    files = read_table(directory)["files"]
    return [record for name in files for record in json.loads((directory / f".{name}").read_text())]
