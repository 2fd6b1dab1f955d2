"""Measures what state that can go back to a checkpoint costs while nothing fails.

`python benchmarks/kept_price.py reduce` takes one step, alone, with and without
`headgate.recovery.keep-state`. Both get the same batches, in turns, batch by batch: records of random keys,
once all keys are there. A checkpoint is complete after each `--cut-every` batches. Printed is the ratio of
their processor times, of several rounds.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from kept_state import Count

import headgate as hg
from headgate.api.stream import output_of
from headgate.connectors import from_list, numbers
from headgate.operators.base import Operator
from headgate.operators.elements import Batch, ColumnBatch, ObjectBatch
from headgate.state.snapshot import CommitPermit, StateSnapshot
from headgate.testing.connectors import make_context

ROWS = 32_768
BATCHES = 60
LAG_MS = 10_000
"""Event time is this far behind the records. Each is 1 ms behind the one before."""
FEW = 1_000
"""One record out of this number goes to the left side of a join."""


class Forgotten:
    """An output that forgets."""

    def emit(self, batch: Batch) -> None: ...
    def emit_side(self, tag: str, batch: Batch) -> None: ...
    def emit_watermark(self, timestamp: int) -> None: ...
    def emit_idle(self, idle: bool) -> None: ...


# -- steps --------------------------------------------------------------------------------------------


def _total(value: int, record: int) -> int:
    return value + record


def _any_total(value: Any, record: Any) -> Any:
    """The same, whose results are pickled, as their type is not known."""
    return value + record


def _objects(keys: int) -> Any:
    job = hg.Job("bench")
    return job.read(numbers(1), name="numbers").key_with(lambda number: number % keys)


def _columns(job: hg.Job | None = None, name: str = "numbers") -> Any:
    schema = {"key": "long", "number": "long"}
    rows = (job or hg.Job("bench")).read(from_list([], schema=schema), name=name)
    return rows.event_time("number", name=f"time of {name}").key_by("key")


def _aggregated(keyed: Any) -> Any:
    named = {"n": hg.count(), "total": hg.sum("number"), "highest": hg.max("number")}
    return keyed.agg(**named, name="step")


def _windows(window: Any) -> Any:
    return _aggregated(_columns().window(window))


def _joined(join: Callable[[Any, Any], Any]) -> Any:
    job = hg.Job("bench")
    return join(_columns(job, "few"), _columns(job, "many"))


class Step(NamedTuple):
    """A step that is measured.

    Attributes:
        make: returns its stream, for a number of keys.
        columns: it takes columns; otherwise Python numbers.
        inputs: how many it has. Of two the first one gets few records.
    """

    make: Callable[[int], Any]
    columns: bool = True
    inputs: int = 1


STEPS = {
    "process": Step(lambda keys: _objects(keys).process(Count(), name="step"), columns=False),
    "reduce": Step(lambda keys: _objects(keys).reduce(_total, name="step"), columns=False),
    "reduce-any": Step(lambda keys: _objects(keys).reduce(_any_total, name="step"), columns=False),
    "running": Step(lambda _: _aggregated(_columns())),
    "tumbling": Step(lambda _: _windows(hg.tumbling("100s"))),
    "sliding": Step(lambda _: _windows(hg.sliding("100s", "20s"))),
    "counts": Step(lambda _: _windows(hg.count_window(10))),
    "sessions": Step(lambda _: _windows(hg.session("300d"))),
    "short-sessions": Step(lambda _: _windows(hg.session("30s"))),
    "as-of-join": Step(
        lambda _: _joined(
            lambda few, many: few.join_as_of(many, how="left", suffix="_many", name="step")
        ),
        inputs=2,
    ),
    "interval-join": Step(
        lambda _: _joined(
            lambda few, many: few.join(many, within=("-100s", "100s"), suffix="_many", name="step")
        ),
        inputs=2,
    ),
    "window-join": Step(
        lambda _: _joined(
            lambda few, many: few.window(hg.tumbling("100s")).join(
                many, suffix="_many", name="step"
            )
        ),
        inputs=2,
    ),
}


class Given(NamedTuple):
    """Batches with their inputs, and the event time behind them."""

    batches: list[tuple[int, Batch]]
    watermark: int


def given(step: Step, keys: np.ndarray, first: int) -> Given:
    """Return records of these keys; `first` is the number of the first one."""
    if not step.columns:
        return Given([(0, ObjectBatch(keys.tolist(), None))], first)
    times = np.arange(first, first + len(keys))
    columns = [pa.array(keys), pa.array(times)]
    many = ColumnBatch(pa.RecordBatch.from_arrays(columns, names=["key", "number"]), times)
    batches = [(step.inputs - 1, many)]
    if step.inputs > 1:
        batches.insert(0, (0, many.take(np.arange(0, len(keys), FEW))))
    return Given(batches, first - LAG_MS)


# -- the measurement ----------------------------------------------------------------------------------


class Subject:
    """A step with or without the option; perhaps it will be restored from a checkpoint."""

    def __init__(self, step: Step, keys: int, keeps: bool, restored: int = 0) -> None:
        node = output_of(step.make(keys)).node
        assert node.factory is not None
        self.operator: Operator = node.factory()
        self.operator.output = Forgotten()
        options = {"headgate.recovery.keep-state": str(keeps).lower()}
        self.operator.open(make_context(options=options, restored_checkpoint=restored))
        self._snapshot: StateSnapshot | None = None
        self.cpu_s = 0.0

    def process(self, given: Given, checkpoint_id: int) -> None:
        """Process batches, behind the cut of a checkpoint if there is one; the one before is complete."""
        operator = self.operator
        began = time.process_time()
        if checkpoint_id:
            if checkpoint_id > 1:
                operator.on_checkpoint_complete(CommitPermit("bench", 1, checkpoint_id - 1))
            self._snapshot = operator.snapshot(checkpoint_id)
        for input_index, batch in given.batches:
            operator.process(batch, input_index)
        operator.on_watermark(given.watermark)
        self.cpu_s += time.process_time() - began
        if self._snapshot is not None:  # written by another thread, so this does not count
            for cut in self._snapshot.tables.values():
                cut.make(None)
                if cut.confirm is not None:
                    cut.confirm(cut.epoch)
            self._snapshot = None

    def close(self) -> None:
        """End it."""
        self.operator.close()


def measure(step: Step, keys: int, cut_every: int, seed: int) -> tuple[float, float]:
    """Return the CPU seconds per million records without the option, and with it."""
    rng = np.random.default_rng(seed)
    subjects = [Subject(step, keys, keeps) for keeps in (False, True)]
    number = 0
    for first in range(0, keys, ROWS):
        some = given(step, np.arange(first, min(first + ROWS, keys)), number)
        number += ROWS
        for subject in subjects:
            subject.process(some, 0)
    gc.collect()
    for subject in subjects:
        subject.cpu_s = 0.0
    for turn in range(BATCHES):
        some = given(step, rng.integers(0, keys, ROWS), number)
        number += ROWS
        checkpoint_id = 0 if turn % cut_every else turn // cut_every + 1
        for subject in subjects if turn % 2 else reversed(subjects):
            subject.process(some, checkpoint_id)
    for subject in subjects:
        subject.close()
    off, on = (subject.cpu_s * 1e6 / (ROWS * BATCHES) for subject in subjects)
    return off, on


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("step", choices=STEPS)
    parser.add_argument("--keys", type=int, default=100_000)
    parser.add_argument("--cut-every", type=int, default=20, help="batches per checkpoint")
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    ratios = []
    for seed in range(chosen.rounds):
        off, on = measure(STEPS[chosen.step], chosen.keys, chosen.cut_every, seed)
        ratios.append(on / off)
        print(f"  {off:.4f} and {on:.4f} CPU s per million records: {ratios[-1]:.2f}", flush=True)
    print(f"{chosen.step}, {chosen.keys:,} keys: a ratio of {median(ratios):.2f}")


if __name__ == "__main__":
    main()
