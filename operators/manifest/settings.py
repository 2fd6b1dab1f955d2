"""What a manifest says about the job as a whole: parallelism, checkpoints, restarts, options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ..job_graph import JobGraph
from .document import Problems
from .fields import Table
from .registry import Toolbox

OPTION_OF = {
    ("spec", "parallelism"): "parallelism.default",
    ("spec", "maxParallelism"): "pipeline.max-parallelism",
    ("checkpoint", "every"): "execution.checkpointing.interval",
    ("checkpoint", "storage"): "execution.checkpointing.dir",
    ("checkpoint", "timeout"): "execution.checkpointing.timeout",
    ("checkpoint", "minPause"): "execution.checkpointing.min-pause",
    ("checkpoint", "maxConcurrent"): "execution.checkpointing.max-concurrent-checkpoints",
    ("checkpoint", "tolerableFailures"): "execution.checkpointing.tolerable-failed-checkpoints",
    ("checkpoint", "retain"): "execution.checkpointing.num-retained",
    ("restart", "strategy"): "restart-strategy.type",
    ("restart", "attempts"): "restart-strategy.fixed-delay.attempts",
    ("restart", "delay"): "restart-strategy.fixed-delay.delay",
}
"""Fields that say the same as an option: who sets both contradicts himself."""

_CHECKPOINT_ARGUMENTS = {
    "every": "every",
    "storage": "storage",
    "timeout": "timeout",
    "minPause": "min_pause",
    "maxConcurrent": "max_concurrent",
    "tolerableFailures": "tolerable_failures",
    "retain": "retain",
}


class Attempts(Protocol):
    """What notes a refused call as a problem at a line."""

    problems: Problems

    def attempt(self, line: int, action: Callable[[], Any]) -> Any: ...


def job_arguments(spec: Table, toolbox: Toolbox, problems: Problems) -> dict[str, Any]:
    """The keyword arguments of the job; options that are wrong are noted and left out."""
    options = spec.get("options") or Table(spec.line)
    texts: dict[str, str] = dict(options.values)
    for key, error in toolbox.check_options(texts).items():
        problems.add(options.line_of(key), error.message, error.fix)
        texts.pop(key)
    current = {toolbox.current_key(key): key for key in texts}
    for (section, field), option in OPTION_OF.items():
        table = spec if section == "spec" else spec.get(section)
        if isinstance(table, Table) and table.tried(field) and option in current:
            key = current[option]
            problems.add(
                options.line_of(key),
                f"option and field say the same key=`{key}` field=`{section}.{field}`",
                f"line {table.line_of(field)} sets it already; remove one",
            )
    return {
        "parallelism": spec.get("parallelism", 1),
        "max_parallelism": spec.get("maxParallelism"),
        "options": texts,
    }


def has_checkpoints(spec: Table, toolbox: Toolbox) -> bool:
    """Does the manifest ask for checkpoints, however badly?"""
    options = spec.get("options") or Table(spec.line)
    keys = {toolbox.current_key(key) for key in options.values}
    return spec.tried("checkpoint") or OPTION_OF["checkpoint", "storage"] in keys


def apply_settings(job: JobGraph, spec: Table, attempts: Attempts) -> None:
    """Set checkpoints and restarts."""
    checkpoint = spec.get("checkpoint")
    if checkpoint is not None and {"every", "storage"} <= checkpoint.values.keys():
        arguments = {
            argument: checkpoint.get(field)
            for field, argument in _CHECKPOINT_ARGUMENTS.items()
            if field in checkpoint.values
        }
        attempts.attempt(checkpoint.line, lambda: job.checkpoint(**arguments))
    restart = spec.get("restart")
    if restart is not None:
        _restart(job, restart, attempts)


def _restart(job: JobGraph, restart: Table, attempts: Attempts) -> None:
    arguments = {
        name: restart.get(name) for name in ("attempts", "delay") if name in restart.values
    }
    if restart.get("strategy") == "none":
        for name in restart.present(["attempts", "delay"]):
            attempts.problems.add(
                restart.line_of(name), f"strategy `none` has no {name}", "remove one of them"
            )
        arguments = {"attempts": 0}
    attempts.attempt(restart.line, lambda: job.restart(**arguments))
