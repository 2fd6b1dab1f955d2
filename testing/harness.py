"""The harness: a whole job in the hands of a test, without servers, threads or waiting."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Any, Literal, Self, overload

import pyarrow as pa

from ..errors import UsageError
from ..operators.durations import Duration, parse_duration
from ..operators.elements import Batch, ColumnBatch
from ..operators.suggestions import suggest
from ..runtime.job import Job
from .records import Time, to_batches, to_ms, to_records, to_times, with_times
from .rewire import check_job, rewire
from .run import Playback, VirtualRun
from .steering import is_declarable
from .world import SinkBox, SourceBox, World, new_world

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Harness:
    """A job that runs during the `with` block of `harness`, which documents it.

    Every call returns when the job has nothing left to do at the present moment, and raises the job's
    error if it failed. Time passes only in `advance_time` and, if something waits for it, in `end`.
    """

    def __init__(
        self,
        job: Job,
        *,
        seed: int,
        parallelism: int | None,
        restore_from: str | os.PathLike[str] | None,
        allow_non_restored_state: bool,
    ) -> None:
        self._seed = seed
        self._world: World = new_world()
        self._run: VirtualRun | None = None
        self._closed = False
        self._spec = rewire(
            check_job(job),
            self._world,
            parallelism=parallelism,
            restore_from=restore_from,
            allow_non_restored_state=allow_non_restored_state,
        )

    def __enter__(self) -> Self:
        if self._run is not None:
            raise UsageError("a harness is used once", fix="make another: harness(job)")
        _check_no_loop()
        self._run = VirtualRun(self._spec, self._seed)
        self._playback = Playback(self._world, self._run)
        try:
            self._run.start()
            self._playback.replay()
        except BaseException:
            self._run.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._closed:
            self._running.close()
            self._closed = True

    # -- what comes in ------------------------------------------------------------------------------

    def push(self, source: str, *records: Any, at: Time | Sequence[Time] | None = None) -> None:
        """Let a source produce records.

        All records of a call arrive together, in order, in one subtask of the source; the next call goes
        to the next subtask. When this returns, the job has processed them.

        Args:
            source: the name given to `job.read`.
            records: each a record (an instance of the source's class, a mapping, a tuple, or any
                object for a source of Python objects), a list of records, or a `pa.RecordBatch`.
            at: their event time, one for all or one each. Only for sources without an `event_time` step
                behind them.

        Raises:
            UsageError: there is no such source, it has ended, or a record does not fit its schema.
            HeadgateError: the job failed.
        """
        box = self._open_source(source)
        batches = to_batches(box, records)
        if at is not None:
            if box.event_time_steps:
                raise UsageError(
                    f"records of `{source}` get their time from the job "
                    f"step=`{box.event_time_steps[0]}`",
                    fix="leave out at=",
                )
            times = to_times(at, sum(map(len, batches)))
            batches = with_times(batches, times)
        self._playback.push(box, batches)

    def advance_watermark(self, source: str, to: Time) -> None:
        """Declare that the event time of a source has reached `to`: earlier records are late from now on.

        The watermark applies to the `event_time` steps behind the source, in all their subtasks, in
        addition to those that the steps make as time passes.

        Args:
            source: the name given to `job.read`.
            to: the watermark.

        Raises:
            UsageError: there is no such source, it has ended or has no event time, or time would go back.
            HeadgateError: the job failed.
        """
        box = self._open_source(source)
        timestamp = to_ms(to)
        if not box.event_time_steps:
            raise UsageError(
                f"no event_time step stands behind source `{source}`",
                fix="a watermark has no meaning there",
            )
        back = box.watermark is not None and timestamp < box.watermark
        if back or not is_declarable(timestamp):
            raise UsageError(
                f"event time of `{source}` cannot go there to=`{timestamp}` now=`{box.watermark}`",
                fix="watermarks only rise",
            )
        self._playback.advance(box, timestamp)

    def advance_time(self, by: Duration) -> None:
        """Let time pass: timers fire, idle sources are noticed, watermarks go out, calls time out.

        Args:
            by: a duration, such as `"10s"` or a timedelta.

        Raises:
            UsageError: not a duration.
            HeadgateError: the job failed.
        """
        self._running.advance(parse_duration(by, "advance_time"))
        self._playback.catch_up()

    @property
    def now(self) -> datetime:
        """The time by the job's wall clock, which begins at 2026-01-01, 00:00 UTC."""
        return _EPOCH + timedelta(milliseconds=self._running.clock.now_ms())

    def end(self, source: str | None = None) -> None:
        """End the data of a source, or of all. When all have ended, the job finishes.

        Event time of an ended source runs out, so its windows fire; with the last source the sinks
        commit everything. Time passes if the job waits for it, such as for calls under way.

        Raises:
            UsageError: no such source, or it has ended.
            HeadgateError: the job failed, or does not finish.
        """
        if source is not None:
            self._playback.end(self._open_source(source))
        else:
            for box in self._world.sources.values():
                if not box.closed:
                    self._playback.end(box)
        if all(box.closed for box in self._world.sources.values()):
            self._running.finish()

    # -- what happens to the job --------------------------------------------------------------------

    def settle(self) -> None:
        """Run the job until nothing is left to do at this moment. All other calls do this too.

        Raises:
            HeadgateError: the job failed.
        """
        self._running.settle()

    def checkpoint(self) -> int:
        """Complete a checkpoint; exactly-once sinks commit with it.

        Returns:
            the number of the checkpoint.

        Raises:
            HeadgateError: the job failed, or something holds the checkpoint up.
        """
        self._check_runs()
        return int(self._running.request("checkpoint", "the checkpoint")["checkpoint"])

    def savepoint(self, path: str | os.PathLike[str]) -> str:
        """Write a savepoint below the directory `path`.

        Returns:
            the path of the savepoint, for `harness(job, restore_from=...)`.

        Raises:
            HeadgateError: the job failed, or the savepoint cannot be written.
        """
        self._check_runs()
        target = os.path.abspath(os.fspath(path))
        answer = self._running.request("savepoint", "the savepoint", savepoint=target)
        return str(answer["savepoint"])

    def crash(self) -> None:
        """Lose everything in memory, restore the newest checkpoint, and read the later records again.

        Records come again in the order in which they were pushed, and watermarks are declared again.
        Records that exactly-once sinks had not committed are gone.

        Raises:
            HeadgateError: the job cannot be restored, or fails again.
        """
        self._check_runs()
        self._running.crash()
        self._playback.replay()

    def rescale(self, parallelism: int) -> None:
        """Take a checkpoint, and go on with this number of subtasks per step.

        Raises:
            UsageError: nothing would change, or the number is above that of key groups.
            HeadgateError: the job failed.
        """
        self._check_runs()
        self._running.request("rescale", "the rescale", parallelism=parallelism)
        self._playback.replay()

    # -- what comes out -----------------------------------------------------------------------------

    @overload
    def drain(self, name: str, *, as_batches: Literal[False] = ...) -> list[Any]: ...
    @overload
    def drain(self, name: str, *, as_batches: Literal[True]) -> list[pa.RecordBatch]: ...
    def drain(self, name: str, *, as_batches: bool = False) -> list[Any]:
        """Take the records that a sink has made visible since the last call, in the order of writing.

        An exactly-once sink makes records visible when it commits them.

        Args:
            name: the name of a sink, or `step.side` for a side output that the job does not use.
            as_batches: return Arrow batches instead of records.

        Returns:
            instances of the stream's class, dicts if it has none, or the Python objects.

        Raises:
            UsageError: there is no such sink, or it takes Python objects and batches are asked for.
        """
        box = self._sink(name)
        taken, box.visible = sorted(box.visible, key=_place), []
        return _shown(box, [batch for _, batch in taken], as_batches)

    @overload
    def pending(self, name: str, *, as_batches: Literal[False] = ...) -> list[Any]: ...
    @overload
    def pending(self, name: str, *, as_batches: Literal[True]) -> list[pa.RecordBatch]: ...
    def pending(self, name: str, *, as_batches: bool = False) -> list[Any]:
        """Return the records that an exactly-once sink was given and has not committed. Arguments as for
        `drain`.
        """
        box = self._sink(name)
        waiting = sorted(box.pending(self._world.attempt), key=_place)
        return _shown(box, [batch for _, batch in waiting], as_batches)

    # -- inside -------------------------------------------------------------------------------------

    @property
    def _running(self) -> VirtualRun:
        if self._run is None:
            raise UsageError("the job does not run yet", fix="use `with harness(job) as h:`")
        if self._closed:
            raise UsageError("the `with` block of the harness is over, and so is the job")
        return self._run

    def _check_runs(self) -> None:
        self.settle()
        if self._running.ended:
            raise UsageError("the job has finished: all its sources have ended")

    def _open_source(self, name: str) -> SourceBox:
        box = self._world.sources.get(name)
        if box is None:
            raise UsageError(
                f"the job reads no source `{name}`",
                fix=suggest(name, self._world.sources, "sources"),
            )
        self.settle()
        if box.closed:
            raise UsageError(f"source `{name}` has ended")
        return box

    def _sink(self, name: str) -> SinkBox:
        box = self._world.sinks.get(name) or self._world.sides.get(name)
        if box is None:
            names = [*self._world.sinks, *self._world.sides]
            raise UsageError(
                f"the job has no sink `{name}`", fix=suggest(name, names, "sinks and side outputs")
            )
        return box


def harness(
    job: Job,
    *,
    seed: int = 0,
    parallelism: int | None = None,
    restore_from: str | os.PathLike[str] | None = None,
    allow_non_restored_state: bool = False,
) -> Harness:
    """Run a job in this process, for a test, with virtual time and without its sources and sinks.

        with harness(job, seed=7, parallelism=2) as h:
            h.push("orders", Order("a", 5.0, at=t0))
            h.advance_watermark("orders", t0 + timedelta(hours=1))
            assert len(h.drain("hot")) == 1

    The job runs as its user wrote it, with real checkpoints in memory. Each source produces the records
    that the test pushes, and each sink collects its records, under the names that they have in the job.
    Checkpoints are taken only on request, and a failure ends the job. The same seed gives the same run.

    Args:
        job: the job, written in Python or loaded from a manifest. It is not changed.
        seed: determines the order in which the parts of the job take turns.
        parallelism: the subtasks of every step without a parallelism of its own; None: that of the job.
        restore_from: begin with the state of this savepoint, or of the newest checkpoint in this
            directory. Nothing has been pushed into its sources yet.
        allow_non_restored_state: drop restored state that belongs to no step.

    Raises:
        UsageError: the job is wrong as written.
    """
    return Harness(
        job,
        seed=seed,
        parallelism=parallelism,
        restore_from=restore_from,
        allow_non_restored_state=allow_non_restored_state,
    )


def _place(entry: tuple[int, Batch]) -> int:
    return entry[0]


def _shown(box: SinkBox, batches: list[Batch], as_batches: bool) -> list[Any]:
    if not as_batches:
        return to_records(batches, box.row_type)
    if box.schema is None:
        raise UsageError(
            f"`{box.name}` gets Python objects, which have no columns", fix="leave out as_batches"
        )
    return [batch.data for batch in batches if isinstance(batch, ColumnBatch)]


def _check_no_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise UsageError(
        "a harness has its own event loop, and one runs here already",
        fix="write the test as a plain function, not as a coroutine",
    )
