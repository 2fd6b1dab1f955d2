"""A harness that runs one operator: what went out, in order, and snapshots as chains of deltas."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from headgate.operators.base import Operator, OperatorContext
from headgate.operators.clock import SystemClock
from headgate.operators.elements import Batch
from headgate.runtime.task.table_merge import merge_chain
from headgate.state.keygroups import key_group_range
from headgate.state.snapshot import RestoredState

MAX_PARALLELISM = 8


@dataclass
class Recorder:
    """An output and metrics in one: keeps `events` in order, and counters."""

    events: list[tuple[str, Any]] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)

    def emit(self, batch: Batch) -> None:
        self.events.append(("rows", batch))

    def emit_side(self, tag: str, batch: Batch) -> None:
        self.events.append((tag, batch))

    def emit_watermark(self, timestamp: int) -> None:
        self.events.append(("watermark", timestamp))

    def counter(self, name: str) -> Any:
        recorder = self

        class Counter:
            def inc(self, amount: int = 1) -> None:
                recorder.counters[name] = recorder.counters.get(name, 0) + amount

        return Counter()

    def rows(self, kind: str = "rows") -> list[tuple[Any, ...]]:
        """All rows that went out, as tuples, instants in ms, each with its timestamp at the end."""
        found: list[tuple[Any, ...]] = []
        for event, batch in self.events:
            if event == kind:
                for row, time in zip(
                    batch.data.to_pylist(), batch.timestamps.tolist(), strict=True
                ):
                    found.append((*map(plain, row.values()), time))
        return found


def plain(value: Any) -> Any:
    return round(value.timestamp() * 1000) if hasattr(value, "timestamp") else value


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
        """What a restore would read."""
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
        own, recorder = key_group_range(index, parallelism, MAX_PARALLELISM), Recorder()
        operator.output = recorder
        operator.open(
            OperatorContext(
                job_name="job",
                operator_name="step",
                subtask_index=index,
                parallelism=parallelism,
                max_parallelism=MAX_PARALLELISM,
                attempt=1,
                key_groups=own,
                clock=SystemClock(),
                timers=None,
                metrics=recorder,
                logger=logging.getLogger("test"),
                run_in_thread=None,
            )
        )
        if tables is not None:
            kept = {}
            for name in tables[0]:
                table = pa.concat_tables(part[name] for part in tables)
                groups = table.column(0).to_numpy()
                order = np.argsort(groups, kind="stable")
                mine = (groups[order] >= own.first) & (groups[order] <= own.last)
                kept[name] = table.take(pa.array(order[mine]))
            operator.restore(RestoredState(tables=kept))
        return Subtask(operator, recorder)

    return start_
