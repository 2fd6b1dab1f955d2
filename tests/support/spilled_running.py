"""Running aggregates on disk: one subtask, its last results, and the files of a checkpoint."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

from headgate.operators.aggregation.aggregates import AggregatePlan
from headgate.operators.aggregation.running_aggregate import RunningAggregate
from headgate.operators.elements import ColumnBatch
from headgate.state.keygroups import key_group_range
from headgate.state.snapshot import RestoredFiles
from headgate.tests.support.operators import in_place, operator_context

MAX_PARALLELISM = 16
_attempts = itertools.count()


class LastRows:
    """An output that keeps the last result of each key."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        self.keys = keys
        self.last: dict[Any, dict[str, Any]] = {}

    def emit(self, batch: ColumnBatch) -> None:
        for row in batch.data.to_pylist():
            self.last[tuple(row[key] for key in self.keys)] = row


def start_running(
    plan: AggregatePlan, directory: Path, index: int = 0, parallelism: int = 1, **options: str
) -> tuple[RunningAggregate, LastRows]:
    """Start a subtask with a directory of its own; return it with its output."""
    operator, output = RunningAggregate(plan), LastRows(tuple(plan.keys))
    attempt = next(_attempts)
    own = directory / f"attempt{attempt}"
    own.mkdir()
    operator.output = output  # type: ignore[assignment]
    operator.open(
        operator_context(
            index,
            parallelism,
            MAX_PARALLELISM,
            attempt=attempt,
            run_in_thread=in_place,
            options=options,
            local_directory=lambda: own,
        )
    )
    return operator, output


def kept_files(
    operator: RunningAggregate, store: Path, index: int = 0, parallelism: int = 1
) -> RestoredFiles:
    """Take a checkpoint, and copy its files as a store would keep them."""
    snapshot = operator.snapshot(1)
    assert snapshot is not None
    cut = snapshot.files["running"]
    collected = cut.collect()
    files = {file.id: Path(shutil.copy(file.path, store / file.id)) for file in collected.files}
    cut.release()
    own = key_group_range(index, parallelism, MAX_PARALLELISM)
    return RestoredFiles(collected.meta, files, own.first, own.last)
