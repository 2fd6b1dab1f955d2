"""A job as it travels to its coordinator."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..api.resources import Resources
from ..api.settings import CheckpointSettings, RestartSettings
from ..operators.graph import Graph
from ..operators.sink import IfExists
from .options.registry import Options
from .options.state import (
    ALIGNED_TIMEOUT,
    CHECKPOINT_INCREMENTAL,
    CHECKPOINT_INTERVAL_BACKLOG,
    CHECKPOINT_MODE,
    CHECKPOINT_TIMEOUT,
    UNALIGNED,
)
from .plan import PhysicalPlan, make_plan
from .protocol.checkpoints.settings import CheckpointSettings as CheckpointRules


@dataclass(frozen=True, slots=True)
class JobSpec:
    """Everything a coordinator needs; shipped by value with cloudpickle."""

    name: str
    plan: PhysicalPlan
    parallelism: int
    checkpoint: CheckpointSettings | None
    restart: RestartSettings
    options: dict[str, str]
    graph: Graph
    """What `plan` was made of; made anew when the parallelism changes or key groups are adopted."""
    max_parallelism: int | None = None
    """As the user set it; None: that of the restored checkpoint, else chosen."""
    chaining: bool = True
    slots_per_worker: int = 1
    group_slots: dict[str, int] = field(default_factory=dict)
    """Slots per worker of slot sharing groups whose workers have others than that."""
    resources: dict[str, Resources] = field(default_factory=dict)
    """What a slot takes, by slot sharing group."""
    group_resources: dict[str, str] = field(default_factory=dict)
    """Custom resources of Ray, by group. A slot takes one of that of its group, instead of `resources`."""
    run: str = ""
    """Names this run of the job, so that a coordinator which takes over does not start it anew."""
    outside_run: bool = False
    """The name comes from outside, where somebody starts the run again if its process is gone."""
    fresh: bool = False
    """Do not resume from an existing checkpoint."""
    allow_non_restored_state: bool = False
    restore_from: str = ""
    """Address of a savepoint, or of a job's checkpoints, that this run begins with."""
    claim: bool = False
    """Delete that savepoint once the run has a checkpoint of its own."""
    take_over: bool = False
    """End another run of the job that still goes on."""
    labels: dict[str, str] = field(default_factory=dict)
    """For those who watch the job; `headgate_job_info` shows them."""
    if_exists: IfExists | None = None
    """What to do with output of earlier runs, at a start without state; None: what each sink says."""

    def slots_of(self, group: str) -> int:
        """Slots of a worker of a slot sharing group."""
        return self.group_slots.get(group, self.slots_per_worker)

    def replan(self, parallelism: int, max_parallelism: int | None) -> PhysicalPlan:
        """The plan at another parallelism; operators that set their own keep it.

        Raises:
            PlanError: a parallelism exceeds the number of key groups.
        """
        return make_plan(
            self.graph,
            job_name=self.name,
            parallelism=parallelism,
            max_parallelism=max_parallelism,
            chaining=self.chaining,
        )


def checkpoint_rules(settings: CheckpointSettings | None, options: Options) -> CheckpointRules:
    """When a job takes checkpoints, and how; without storage only savepoints, on request.

    Raises:
        OptionError: what is asked for does not go together.
    """
    incremental = options.get(CHECKPOINT_INCREMENTAL)
    if settings is None:
        return CheckpointRules(
            None, timeout_ms=options.get(CHECKPOINT_TIMEOUT), incremental=incremental
        )
    return CheckpointRules(
        interval_ms=settings.every_ms,
        timeout_ms=settings.timeout_ms,
        min_pause_ms=settings.min_pause_ms,
        max_concurrent=settings.max_concurrent,
        tolerable_failures=settings.tolerable_failures,
        incremental=incremental,
        exactly_once=options.get(CHECKPOINT_MODE) == "EXACTLY_ONCE",
        unaligned=options.get(UNALIGNED),
        aligned_timeout_ms=options.get(ALIGNED_TIMEOUT),
        interval_during_backlog_ms=options.get(CHECKPOINT_INTERVAL_BACKLOG),
    )
