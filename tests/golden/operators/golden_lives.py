"""Lives of a job: calm, with crashes, and going on from a savepoint with more subtasks.

A life runs in the harness: coordinator, workers and subtasks on virtual time, so that the same seed gives
the same interleaving. Unlike there, every slot is a worker of its own, and workers exchange records through
Unix sockets.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pyarrow as pa
from golden_input import STREAM, Order, Portion, Rate

import headgate as hg
from headgate.connectors import blackhole, json_source
from headgate.runtime.manifest import load_job
from headgate.testing import Harness, harness

Rows = dict[str, list[Any]]
"""By sink, in the order they were written."""
RECORDS = {"orders": Order, "rates": Rate}
BATCH = 5
"""Records of one batch."""
BARRIERS_UNDER_WAY = 6
"""Rounds of the event loop behind the request for a checkpoint."""
ROUNDS_MAX = 10_000
HEAD = """\
apiVersion: headgate.io/v1alpha1
kind: StreamJob
metadata: {{name: golden}}
spec:
  maxParallelism: 12
  checkpoint: {{every: 1h, storage: never-made}}
  options: {{state.backend.type: {backend}, io.tmp.dirs: {folder}}}
  sources:
"""


@dataclass(frozen=True)
class Spoken:
    """One job, in Python and in YAML.

    Attributes:
        module: what `HERE` means in the YAML, so that it can name functions of the test.
        yaml: operators, of which `x` is the result; empty if there is no such form.
        twin: makes `x` of the orders and the rates.
        reads: the sources there are.
        sides: side outputs of `x` that are written as well.
        timed: the event time of all sources.
        timed_yaml: the same in YAML.
        folder: for state on disk.
    """

    module: str
    yaml: str
    twin: Callable[[Any, Any], Any]
    reads: tuple[str, ...]
    sides: tuple[str, ...]
    timed: Mapping[str, Any]
    timed_yaml: str
    folder: Path

    def in_python(self) -> hg.Job:
        job = hg.Job("golden", max_parallelism=12)
        job.checkpoint(every="1h", storage="never-made")
        streams: dict[str, Any] = {}
        for name in self.reads:
            read = job.read(json_source("never-read", RECORDS[name]), name=name)
            streams[name] = read.event_time(**self.timed)
        x = self.twin(streams.get("orders"), streams.get("rates"))
        x.write(blackhole(guarantee="exactly_once"), name="out")
        for side in self.sides:
            x.side(side).write(blackhole(guarantee="exactly_once"), name=side)
        return job

    def in_yaml(self, backend: str = "hashmap") -> hg.Job:
        text = HEAD.format(backend=backend, folder=self.folder)
        for name in self.reads:
            text += f"    {name}:\n      json: {{path: never-read}}\n"
            text += f"      schema: golden_input:{RECORDS[name].__name__}\n"
            text += f"      eventTime: {self.timed_yaml}\n"
        text += "  operators:\n"
        text += "".join(f"    {line}\n" for line in self.yaml.strip().splitlines())
        text += "  sinks:\n"
        for name, read in {"out": "x", **{side: f"x.{side}" for side in self.sides}}.items():
            text += f"    {name}: {{from: {read}, blackhole: , guarantee: exactly_once}}\n"
        return load_job(text.replace("HERE", self.module))


@dataclass
class Life:
    """A job under way, and what came out so far.

    Attributes:
        declares: event time is what the input says; else the job has rules of its own.
    """

    h: Harness
    declares: bool
    rows: Rows = field(default_factory=lambda: defaultdict(list))

    def play(self, number: int) -> None:
        """A portion of the input."""
        self.bring(STREAM[number])
        self.pass_on(STREAM[number])

    def play_during_checkpoint(self, number: int) -> None:
        """The same, while the barriers of a checkpoint go through."""
        asking = self._ask_for_checkpoint()
        self.bring(STREAM[number])
        assert asking.done()
        assert asking.result()["checkpoint"]
        self.pass_on(STREAM[number])

    def die_among_barriers(self, number: int) -> None:
        """The same, but all is lost while barriers and records are under way."""
        self._die_during_checkpoint(number, lambda rounds: rounds == BARRIERS_UNDER_WAY)

    def die_before_commits(self, number: int) -> None:
        """The same, but all is lost when the checkpoint is in the log, and no sink knows of it."""
        newest = self._newest_entry()
        self._die_during_checkpoint(number, lambda rounds: self._newest_entry() > newest)

    def _die_during_checkpoint(self, number: int, now: Callable[[int], bool]) -> None:
        asking = self._ask_for_checkpoint()
        run = self.h._running
        with mock.patch.object(run, "settle"):
            self.bring(STREAM[number])
        rounds = 0
        while not now(rounds):
            run._loop.call_soon(run._loop.stop)
            run._loop.run_forever()
            rounds += 1
            assert rounds < ROUNDS_MAX
        run.crash()
        assert asking.exception() is not None
        self.h._playback.replay()
        self.pass_on(STREAM[number])

    def _newest_entry(self) -> str:
        names = self.h._running._objects
        return max(name for name in names if name.startswith("log/0"))

    def bring(self, portion: Portion) -> None:
        """All of a source comes in one of its subtasks, so that there is one order of arrival."""
        for name, records in (("orders", portion.orders), ("rates", portion.rates)):
            if source := self.h._world.sources.get(name):
                rows = [msgspec.structs.asdict(record) for record in records]
                cuts = range(0, len(rows), BATCH)
                batches = [rows[at : at + BATCH] for at in cuts]
                self.h.push(
                    name, *(pa.RecordBatch.from_pylist(each, source.schema) for each in batches)
                )

    def pass_on(self, portion: Portion) -> None:
        """Let time pass."""
        if self.declares:
            for name in self.h._world.sources:
                self.h.advance_watermark(name, portion.watermark)
        self.h.advance_time("1s")

    def drain(self) -> None:
        """Take what is visible."""
        for name in self.h._world.sinks:
            self.rows[name] += map(plain, self.h.drain(name))

    def end(self) -> Rows:
        """Nothing more comes; but what waits for the clock still does its work."""
        self.h.advance_time("1m")
        self.h.end()
        self.drain()
        return self.rows

    def _ask_for_checkpoint(self) -> Any:
        run = self.h._running
        return run._loop.create_task(run._ask("checkpoint", {}))


def open_life(job: hg.Job, parallelism: int, restore_from: str | None = None) -> Harness:
    h = harness(job, seed=parallelism, parallelism=parallelism, restore_from=restore_from)
    h._spec = replace(h._spec, slots_per_worker=1)
    return h


def calm(job: hg.Job, declares: bool) -> Rows:
    """One subtask, no failure."""
    with open_life(job, 1) as h:
        life = Life(h, declares)
        for number in range(len(STREAM)):
            life.play(number)
        return life.end()


def stormy(job: hg.Job, declares: bool, folder: Path) -> tuple[Rows, Rows, str]:
    """Two subtasks, checkpoints and crashes: the output, the part of it before a savepoint, and the
    savepoint.
    """
    with open_life(job, 2) as h:
        life = Life(h, declares)
        life.play(0)
        life.play_during_checkpoint(1)
        life.play_during_checkpoint(2)
        life.play(3)
        life.die_among_barriers(4)
        life.play(5)
        h.checkpoint()
        life.drain()
        before = {name: list(rows) for name, rows in life.rows.items()}
        savepoint = h.savepoint(folder)
        life.die_before_commits(6)
        life.play(7)
        return life.end(), before, savepoint


def wider(job: hg.Job, before: Rows, savepoint: str, declares: bool) -> Rows:
    """Three subtasks go on from the savepoint."""
    with open_life(job, 3, savepoint) as h:
        life = Life(h, declares)
        for name, rows in before.items():
            life.rows[name] += rows
        life.play_during_checkpoint(6)
        life.play(7)
        return life.end()


def plain(row: Any) -> Any:
    """As a tuple, floats without their last digits."""
    if isinstance(row, dict):
        row = tuple(row.values())
    elif isinstance(row, msgspec.Struct):
        row = msgspec.structs.astuple(row)
    if isinstance(row, tuple):
        return tuple(round(value, 6) if isinstance(value, float) else value for value in row)
    return row
