"""Job: what users write, check, explain and run."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Literal

from ..errors import (
    HeadgateError,
    InternalError,
    JobError,
    UsageError,
)
from ..operators.written_job import WrittenJob, definition_of
from .control.messages import WARNINGS, Event
from .explain import describe_node, explain_plan
from .job_spec import JobSpec
from .protocol.job_result import JobOutcome
from .runnable_job import RunnableJob, cause_of

_log = logging.getLogger("headgate.run")


class Job(WrittenJob):
    """A job: build it with `read`, the methods of the streams and `write`, then `run` it."""

    _definition_class = RunnableJob

    def run(
        self,
        *,
        cluster: str = "in-process",
        fresh: bool = False,
        allow_non_restored_state: bool = False,
        restore_from: str | os.PathLike[str] | None = None,
        claim: bool = False,
        take_over: bool = False,
        if_exists: Literal["error", "append", "overwrite"] | None = None,
    ) -> JobOutcome:
        """Run the job to its end, in this process or on a cluster, and return how it ended.

        It resumes from its newest checkpoint if there is one, unless the run before had finished. In batch
        mode (`execution.runtime-mode`) it runs on Spark instead, from the beginning, whatever the cluster.

        Args:
            cluster: `in-process`, `local` (an embedded Ray), or the address of a Ray cluster.
            fresh: start without the state of earlier runs.
            allow_non_restored_state: drop checkpointed state that no operator claims any more.
            restore_from: begin a new run with this savepoint, or with the newest checkpoint in this
                directory of a job's checkpoints (number 7 with `@7` behind it).
            claim: delete that savepoint once the run has a checkpoint of its own.
            take_over: end another run of the job that still goes on, and go on from its newest checkpoint.
                Without it such a run is left alone, and this one is refused.
            if_exists: what happens when the run starts without state, and its file sinks hold output of
                earlier runs: refuse to start (`error`), write beside it (`append`), or delete it first
                (`overwrite`). None: what each sink says.

        Raises:
            UsageError: the job is wrong as written, it runs already, or output of earlier runs is in the
                way; nothing was started.
            JobError: the job failed, and restarting did not help.
        """
        try:
            spec = runnable(self).spec(
                fresh=fresh,
                allow_non_restored_state=allow_non_restored_state,
                restore_from=restore_from,
                claim=claim,
                take_over=take_over,
                if_exists=if_exists,
            )
            outcome = self._outcome(spec, cluster)
        except InternalError:
            raise
        except HeadgateError as error:
            raise error.with_traceback(None) from cause_of(error)
        if outcome.status == "FAILED":
            failure = outcome.error or JobError(f"the job failed: {outcome.reason}")
            raise failure.with_traceback(None) from cause_of(failure)
        return outcome

    def _outcome(self, spec: JobSpec, cluster: str) -> JobOutcome:
        if runnable(self).as_batch:
            from .batch.run import run_batch

            return run_batch(spec)
        from .cluster.launch import launch

        # In this process the coordinator's own log says it all.
        on_event = None if cluster == "in-process" else _log_event
        return asyncio.run(launch(spec, cluster, on_event=on_event))

    def explain(self) -> str:
        """The logical and the physical graph, chains, key groups and guarantees, as text.

        Of a job that runs as a batch: Spark's plan, for which Spark is started.

        Raises:
            UsageError: the job is wrong as written.
        """
        try:
            spec = runnable(self).spec()
        except UsageError as error:
            raise error.with_traceback(None) from error.__cause__
        if not runnable(self).as_batch:
            return explain_plan(spec)
        from .batch.run import explain_batch

        return explain_batch(spec)

    def __repr__(self) -> str:
        """The steps as they are written so far; `explain` says how they will run."""
        definition = definition_of(self)
        checkpoint = definition.checkpoint_settings
        stores = f"checkpoints in {checkpoint.storage}" if checkpoint else "no checkpoints"
        head = f"Job {self.name}: parallelism {self.parallelism}, {stores}"
        steps = [f"  {describe_node(node)}" for node in definition.graph.nodes]
        return "\n".join([head, *(steps or ["  no steps yet"])])


def runnable(job: Job) -> RunnableJob:
    """The inside of a job, for headgate's own modules: its definition, plan and specification."""
    definition = definition_of(job)
    assert isinstance(definition, RunnableJob)
    return definition


def _log_event(event: Event) -> None:
    """A job on a cluster runs in other processes: what it announces goes to the log of this one."""
    if event.kind not in ("progress", "ended"):
        level = logging.WARNING if event.kind in WARNINGS else logging.INFO
        _log.log(level, "%s", event.text)
