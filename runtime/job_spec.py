"""A job as it travels to its coordinator."""

from __future__ import annotations

from dataclasses import dataclass

from ..operators.settings import CheckpointSettings, RestartSettings
from .plan import PhysicalPlan


@dataclass(frozen=True, slots=True)
class JobSpec:
    """Everything a coordinator needs; shipped by value with cloudpickle."""

    name: str
    plan: PhysicalPlan
    parallelism: int
    checkpoint: CheckpointSettings | None
    restart: RestartSettings
    options: dict[str, str]
    slots_per_worker: int = 1
    run: str = ""
    """Names this run of the job, so that a coordinator which takes over does not start it anew."""
    fresh: bool = False
    """Do not resume from an existing checkpoint."""
    allow_non_restored_state: bool = False
