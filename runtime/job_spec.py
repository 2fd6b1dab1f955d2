"""A job as it travels to its coordinator."""

from __future__ import annotations

from dataclasses import dataclass

from ..operators.graph import Graph
from ..operators.settings import CheckpointSettings, RestartSettings
from .plan import PhysicalPlan, make_plan


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
    run: str = ""
    """Names this run of the job, so that a coordinator which takes over does not start it anew."""
    fresh: bool = False
    """Do not resume from an existing checkpoint."""
    allow_non_restored_state: bool = False
    restore_from: str = ""
    """Address of a savepoint, or of a job's checkpoints, that this run begins with."""
    claim: bool = False
    """Delete that savepoint once the run has a checkpoint of its own."""

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
