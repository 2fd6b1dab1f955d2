"""The settings of the job as a whole: parallelism, checkpoints, restarts, options."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol

from ..job_definition import WrittenJob, definition_of
from ..resources import GROUP_NAME, Resources
from ..restarts import exponential_delay, failure_rate, fixed_delay, no_restart
from ..settings import RestartSettings
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
    ("restart", "maxFailures"): "restart-strategy.failure-rate.max-failures-per-interval",
    ("restart", "interval"): "restart-strategy.failure-rate.failure-rate-interval",
    ("restart", "initialBackoff"): "restart-strategy.exponential-delay.initial-backoff",
    ("restart", "maxBackoff"): "restart-strategy.exponential-delay.max-backoff",
    ("restart", "backoffMultiplier"): "restart-strategy.exponential-delay.backoff-multiplier",
    ("restart", "jitterFactor"): "restart-strategy.exponential-delay.jitter-factor",
    ("restart", "resetBackoffThreshold"): (
        "restart-strategy.exponential-delay.reset-backoff-threshold"
    ),
}
"""Fields that set the same thing as an option, so that giving both is a contradiction."""

_RUNTIME_MODE: Final = "execution.runtime-mode"
_STREAMING: Final = "STREAMING"
_CHECKPOINT_ARGUMENTS = {
    "every": "every",
    "storage": "storage",
    "timeout": "timeout",
    "minPause": "min_pause",
    "maxConcurrent": "max_concurrent",
    "tolerableFailures": "tolerable_failures",
    "retain": "retain",
}


class ReportsRefusal(Protocol):
    """Reports a refused call as a problem at a line."""

    problems: Problems

    def attempt(self, line: int, action: Callable[[], Any]) -> Any: ...


def job_arguments(spec: Table, toolbox: Toolbox, problems: Problems) -> dict[str, Any]:
    """Return the keyword arguments of the job; wrong options are reported and left out."""
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
                f"option and field set the same key=`{key}` field=`{section}.{field}`",
                f"line {table.line_of(field)} sets it already; remove one",
            )
    return {
        "parallelism": spec.get("parallelism", 1),
        "max_parallelism": spec.get("maxParallelism"),
        "options": texts,
    }


def has_checkpoints(spec: Table, toolbox: Toolbox) -> bool:
    """Return whether the manifest asks for checkpoints, even wrongly."""
    options = spec.get("options") or Table(spec.line)
    keys = {toolbox.current_key(key) for key in options.values}
    return spec.tried("checkpoint") or OPTION_OF["checkpoint", "storage"] in keys


def may_be_batch(job: WrittenJob) -> bool:
    """Return True if the job may be a batch job, which needs no checkpoints.

    Whether it is one is known once all its sources are.
    """
    return job.options.get(_RUNTIME_MODE, _STREAMING).strip().upper() != _STREAMING


def apply_settings(job: WrittenJob, spec: Table, attempts: ReportsRefusal) -> None:
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


def declare_groups(job: WrittenJob, spec: Table, attempts: ReportsRefusal) -> None:
    """Make the groups of `resources` known; those with a mistake as well, for the steps that name them."""
    declared = spec.get("resources")
    if declared is None:
        return
    definition = definition_of(job)
    for name, line in declared.lines.items():
        if not GROUP_NAME.fullmatch(name):
            continue  # noted, and no step can name it
        table = declared.get(name) or Table(line)
        given = dict(table.values)
        if isinstance(custom := given.get("custom"), Table):
            given["custom"] = custom.values
        made = attempts.attempt(line, partial(Resources, **given))
        group = {name: made or Resources()}
        attempts.attempt(line, partial(definition.declare_groups, group))


def _fixed_delay(attempts: int = 3, delay: str = "1s") -> RestartSettings:
    """Call `job.restart` with its defaults."""
    return fixed_delay(attempts, delay)


_RESTARTS: dict[str, tuple[Callable[..., RestartSettings], dict[str, str]]] = {
    "none": (no_restart, {}),
    "fixed-delay": (
        _fixed_delay,
        {"attempts": "attempts", "delay": "delay"},
    ),
    "failure-rate": (
        failure_rate,
        {"maxFailures": "max_failures", "interval": "interval", "delay": "delay"},
    ),
    "exponential-delay": (
        exponential_delay,
        {
            "attempts": "attempts",
            "initialBackoff": "initial",
            "maxBackoff": "max",
            "backoffMultiplier": "multiplier",
            "jitterFactor": "jitter",
            "resetBackoffThreshold": "reset_after",
        },
    ),
}
"""The function and the argument names, by field, of each strategy."""


def _restart(job: WrittenJob, restart: Table, attempts: ReportsRefusal) -> None:
    name = restart.get("strategy", "fixed-delay")
    if name not in _RESTARTS:
        return  # already reported
    make, arguments = _RESTARTS[name]
    for field in restart.present(_RESTART_FIELDS):
        if field not in arguments:
            attempts.problems.add(
                restart.line_of(field), f"strategy `{name}` has no {field}", "remove one of them"
            )
    given = {
        argument: restart.get(field)
        for field, argument in arguments.items()
        if field in restart.values
    }
    attempts.attempt(restart.line, lambda: job.restart(make(**given)))


_RESTART_FIELDS = sorted({field for _, fields in _RESTARTS.values() for field in fields})
