"""A harness that runs one operator: what went out, in order, and snapshots as chains of deltas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pyarrow as pa
import pytest

from headgate.operators.base import Operator
from headgate.runtime.task.state_restore import merge_chain
from headgate.tests.support.operators import MillisecondsRecorder as Recorder
from headgate.tests.support.operators import start_operator


@dataclass
class Subtask:
    """One subtask of an operator, and the chain of tables that its checkpoints have written."""

    operator: Operator
    output: Recorder
    chains: dict[str, list[pa.Table]] = field(default_factory=dict)
    bases: dict[str, int] = field(default_factory=dict)

    def checkpoint(self) -> Callable[[], None]:
        """Take a cut; what it returns writes it: a base first, then deltas."""
        snapshot = self.operator.snapshot(1)
        assert snapshot is not None

        def write() -> None:
            for name, cut in snapshot.tables.items():
                since = self.bases.get(name) if cut.epoch else None
                table = cut.make(since)
                groups = table.column(0).to_pylist()
                assert groups == sorted(groups)
                if since is None:
                    self.chains[name] = []
                self.chains[name].append(table)
                self.bases[name] = cut.epoch
                self.keys[name] = cut.keys

        return write

    keys: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def tables(self) -> dict[str, pa.Table]:
        """Return the tables that a restore would read."""
        return {name: merge_chain(parts, self.keys[name]) for name, parts in self.chains.items()}


@pytest.fixture(scope="session")
def start() -> Callable[..., Subtask]:
    """Starts subtask `index` of `parallelism`, restored from `tables` cut to its key groups."""

    def start_(
        operator: Operator,
        tables: list[dict[str, pa.Table]] | None = None,
        index: int = 0,
        parallelism: int = 1,
    ) -> Subtask:
        recorder = Recorder()
        merged = None
        if tables is not None:
            merged = {
                name: pa.concat_tables(part[name] for part in tables).sort_by("key_group")
                for name in tables[0]
            }
        start_operator(operator, recorder, merged, index, parallelism)
        return Subtask(operator, recorder)

    return start_
