"""The environment of a subtask that runs alone: its vertex, metrics, and what it reports."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import headgate as hg
from headgate.operators.clock import SystemClock
from headgate.runtime.job import runnable
from headgate.runtime.plan import PhysicalPlan, Vertex
from headgate.runtime.storage.memory import MemoryStore
from headgate.runtime.task.environment import TaskEnvironment, TaskSettings
from headgate.runtime.task.local_files import SubtaskDirectory


class Reports:
    """Keeps what a subtask reports: the acknowledged and the declined checkpoints."""

    def __init__(self) -> None:
        self.acks: dict[int, tuple[list[Any], Any]] = {}
        self.declines: dict[int, tuple[str, str]] = {}

    def acked(self, checkpoint_id: int, snapshots: Any, timing: Any) -> None:
        self.acks[checkpoint_id] = (list(snapshots), timing)

    def declined(self, checkpoint_id: int, reason: str, text: str) -> None:
        self.declines[checkpoint_id] = (reason, text)


def no_metrics(*task: Any) -> Any:
    """Return metrics that keep nothing."""
    return SimpleNamespace(
        counter=lambda name: SimpleNamespace(inc=lambda amount=1: None),
        gauge=lambda name, read: None,
        histogram=lambda name: SimpleNamespace(observe=lambda value: None),
    )


def planned(job: hg.Job, step: str) -> tuple[PhysicalPlan, Vertex]:
    """Return the plan of a job at parallelism 1, and the vertex that begins with a step."""
    plan = runnable(job).spec().replan(1, 4)
    (vertex,) = [vertex for vertex in plan.vertices if vertex.head.name == step]
    return plan, vertex


def task_environment(
    plan: Any, vertex: Any, path: Path, threads: Executor, **given: Any
) -> TaskEnvironment:
    """Return the environment of subtask 0 in the first attempt.

    Args:
        plan: the plan of the job.
        vertex: the vertex of the subtask.
        path: its directory.
        threads: its threads for I/O.
        given: other fields of the environment.
    """
    fields: dict[str, Any] = {
        "index": 0,
        "generation": 1,
        "attempt": 1,
        "restored_checkpoint": 0,
        "options": {},
        "settings": TaskSettings(),
        "clock": SystemClock(),
        "store": MemoryStore("job", {}),
        "store_at": None,
        "transfers": asyncio.Semaphore(1),
        "directory": SubtaskDirectory(path),
        "reports": Reports(),
        "metrics_of": no_metrics,
    }
    return TaskEnvironment(plan=plan, vertex=vertex, io_threads=threads, **(fields | given))
