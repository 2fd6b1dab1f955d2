"""A harness that runs one operator: what went out, in order, and snapshots as chains of deltas."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from headgate.operators.base import Operator, OperatorContext
from headgate.operators.clock import SystemClock
from headgate.runtime.task.table_merge import merge_chain
from headgate.state.keygroups import key_group_range
from headgate.state.snapshot import RestoredState

_PATH = Path(__file__).parents[1] / "windows" / "conftest.py"
_spec = importlib.util.spec_from_file_location("windows_conftest", _PATH)
assert _spec is not None
assert _spec.loader is not None
_windows = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = _windows
_spec.loader.exec_module(_windows)

MAX_PARALLELISM = 8
Recorder = _windows.MillisecondsRecorder


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
