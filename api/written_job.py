"""WrittenJob: the part of a job's public face with which it is written; `Job` can also run it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import ClassVar

from ..errors import PlanError, UsageError
from ..operators.addresses import STORAGE_SCHEMES, check_address
from ..operators.durations import Duration, parse_duration
from ..operators.graph import Node
from ..operators.origin import capture_origin
from ..operators.source import REJECTED, Record, Source
from .job_definition import JobDefinition
from .node_output import NodeOutput
from .required_name import named
from .resources import Resources
from .restarts import fixed_delay
from .settings import CheckpointSettings, ExponentialDelay, FailureRate, FixedDelay, RestartSettings
from .stream import Stream


class WrittenJob:
    """A job being written: its sources and settings. Steps are added by the methods of its streams.

    Args:
        name: names the job in its storage, its metrics and on the command line.
        parallelism: subtasks of every operator that says nothing else.
        max_parallelism: number of key groups, fixed for the life of the job's state; None: chosen.
        options: option keys and values as listed by `headgate options`.
        labels: such as {"team": "search"}; the metric `headgate_job_info` shows them.
        resources: slot sharing groups and what each slot of one takes, such as
            {"gpu": hg.Resources(cpu=2, gpu=1)}; steps name them with `slot_sharing_group`.
    """

    _definition_class: ClassVar[type[JobDefinition]] = JobDefinition

    def __init__(
        self,
        name: str,
        *,
        parallelism: int = 1,
        max_parallelism: int | None = None,
        options: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
        resources: Mapping[str, Resources] | None = None,
    ) -> None:
        self._definition = self._definition_class(
            name,
            parallelism=parallelism,
            max_parallelism=max_parallelism,
            options=options,
            labels=labels,
            resources=resources,
        )

    @property
    def name(self) -> str:
        """The name of the job in its storage, its metrics and on the command line."""
        return self._definition.name

    @property
    def parallelism(self) -> int:
        """Subtasks of every operator that says nothing else."""
        return self._definition.parallelism

    @property
    def max_parallelism(self) -> int | None:
        """Number of key groups; None: chosen from the highest parallelism of the job."""
        return self._definition.max_parallelism

    @property
    def options(self) -> dict[str, str]:
        """The job's own options by key; a change of this dictionary is a change of the job."""
        return self._definition.options

    @property
    def labels(self) -> dict[str, str]:
        """For those who watch many jobs; the metric `headgate_job_info` shows them."""
        return self._definition.labels

    @property
    def resources(self) -> dict[str, Resources]:
        """The slot sharing groups of the job that were declared, and what each slot of one takes."""
        return dict(self._definition.resources)

    @named("source", "its position in the input is stored under this name")
    def read(
        self, source: Source[Record], *, name: str, parallelism: int | None = None
    ) -> Stream[Record]:
        """The stream of a source's records."""
        origin = capture_origin()
        if not isinstance(source, Source):
            raise PlanError(
                f"read needs a source, got `{type(source).__name__}`", where=str(origin)
            )
        node = self._definition.add_node(
            Node(
                name=name,
                kind="source",
                origin=origin,
                source=source,
                schema=source.schema,
                row_type=source.row_type,
                parallelism=parallelism,
                stateful=True,
                sides={REJECTED: source.rejected_schema},
                detail=source.describe(),
            )
        )
        return Stream(NodeOutput(self._definition, node))

    def checkpoint(
        self,
        every: Duration,
        storage: str | os.PathLike[str],
        *,
        timeout: Duration = "10m",
        min_pause: Duration = "0s",
        max_concurrent: int = 1,
        tolerable_failures: int = 0,
        retain: int = 1,
    ) -> None:
        """Make the job's state durable.

        Args:
            every: from the start of one checkpoint to the start of the next.
            storage: a directory or an object-store address such as `s3://bucket/path`.
            timeout: a checkpoint not complete by then is given up.
            min_pause: least time between the end of one and the start of the next.
            max_concurrent: checkpoints under way at the same time.
            tolerable_failures: failed checkpoints in a row that do not fail the job.
            retain: completed checkpoints that are kept.
        """
        origin = capture_origin()
        every_ms = parse_duration(every, "checkpoint interval", str(origin))
        timeout_ms = parse_duration(timeout, "checkpoint timeout", str(origin))
        limits = {"every": every_ms, "timeout": timeout_ms, "max_concurrent": max_concurrent}
        for what, value in {**limits, "retain": retain}.items():
            if value < 1:
                raise PlanError(f"checkpoint({what}=...) must be positive", where=str(origin))
        if tolerable_failures < 0:
            raise PlanError(
                "checkpoint(tolerable_failures=...) must not be negative", where=str(origin)
            )
        storage = os.fspath(storage) if isinstance(storage, os.PathLike) else storage
        if not isinstance(storage, str) or not storage.strip():
            raise PlanError(
                "checkpoint needs a place to store",
                where=str(origin),
                fix='add storage="directory or s3://…"',
            )
        try:
            check_address(storage, STORAGE_SCHEMES)
        except UsageError as error:
            raise PlanError(error.message, where=str(origin), fix=error.fix) from None
        self._definition.checkpoint_settings = CheckpointSettings(
            every_ms=every_ms,
            storage=storage,
            timeout_ms=timeout_ms,
            min_pause_ms=parse_duration(min_pause, "checkpoint min_pause", str(origin)),
            max_concurrent=max_concurrent,
            tolerable_failures=tolerable_failures,
            retain=retain,
        )

    def restart(self, attempts: int | RestartSettings = 3, delay: Duration = "1s") -> None:
        """After a failure start again from the last checkpoint.

        Args:
            attempts: how often, at most; or a strategy: `hg.exponential_delay(...)`,
                `hg.failure_rate(...)`, `hg.fixed_delay(...)`, `hg.no_restart()`.
            delay: pause before each restart; with a number of attempts.

        Raises:
            PlanError: a number below 0, or a duration that is none.
        """
        if isinstance(attempts, FixedDelay | FailureRate | ExponentialDelay):
            self._definition.restart_settings = attempts
        else:
            self._definition.restart_settings = fixed_delay(attempts, delay)

    def validate(self) -> None:
        """Check the whole job.

        Raises:
            PlanError: the first reason why it cannot run.
        """
        self._definition.validate()


def definition_of(job: WrittenJob) -> JobDefinition:
    """The inside of a job, for headgate's own modules."""
    return job._definition
