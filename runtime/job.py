"""Job: a job graph that can be run, and explained."""

from __future__ import annotations

import asyncio
import copy
import logging
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal

from ..errors import (
    HeadgateError,
    InternalError,
    JobError,
    PlanError,
    UsageError,
    UserCodeError,
    UserTraceback,
)
from ..operators.durations import format_duration
from ..operators.graph import Graph, Origin
from ..operators.job_graph import JobGraph
from ..operators.keyed_backend import check_state_backend
from ..operators.settings import CheckpointSettings
from ..operators.sink import Guarantee, IfExistsLike, parse_if_exists
from ..operators.stream_base import StreamBase
from .batch.refuse import batch_problems, runs_as_batch
from .batch_options import RUNTIME_MODE
from .checkpoint_options import (
    CHECKPOINT_DIR,
    CHECKPOINT_INTERVAL,
    CHECKPOINT_MAX_CONCURRENT,
    CHECKPOINT_MIN_PAUSE,
    CHECKPOINT_MODE,
    CHECKPOINT_RETAINED,
    CHECKPOINT_TIMEOUT,
    CHECKPOINT_TOLERABLE_FAILURES,
    RECOVERY_CLAIM_MODE,
    RECOVERY_IGNORE_UNCLAIMED,
    RECOVERY_PATH,
    SAVEPOINT_DIR,
)
from .control.messages import WARNINGS, Event
from .explain import describe_node, explain_plan
from .job_spec import JobSpec, checkpoint_rules
from .option_types import Option
from .options import (
    CHAINING,
    MAX_PARALLELISM,
    PARALLELISM,
    Options,
    current_key,
)
from .pickled_state import check_pickles
from .plan import make_plan
from .protocol.job_result import JobOutcome
from .requirements import missing_packages
from .restart_settings import restart_settings
from .unshippable import unshippable

_log = logging.getLogger("headgate.run")
_CHECKPOINT_FIELDS: dict[str, Option[int]] = {
    "timeout_ms": CHECKPOINT_TIMEOUT,
    "min_pause_ms": CHECKPOINT_MIN_PAUSE,
    "max_concurrent": CHECKPOINT_MAX_CONCURRENT,
    "tolerable_failures": CHECKPOINT_TOLERABLE_FAILURES,
    "retain": CHECKPOINT_RETAINED,
}


_PUBLIC: Final = (
    "checkpoint",
    "explain",
    "max_parallelism",
    "name",
    "options",
    "parallelism",
    "read",
    "restart",
    "run",
    "validate",
)


class Job(JobGraph):
    """A job: build it with `read`, the methods of the streams and `write`, then `run` it."""

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
            spec = self.spec(
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
            raise error.with_traceback(None) from _cause_of(error)
        if outcome.status == "FAILED":
            failure = outcome.error or JobError(f"the job failed: {outcome.reason}")
            raise failure.with_traceback(None) from _cause_of(failure)
        return outcome

    def _outcome(self, spec: JobSpec, cluster: str) -> JobOutcome:
        if self.as_batch:
            from .batch.run import run_batch

            return run_batch(spec)
        from .cluster.launch import launch

        # In this process the coordinator's own log says it all.
        on_event = None if cluster == "in-process" else _log_event
        return asyncio.run(launch(spec, cluster, on_event=on_event))

    def __dir__(self) -> list[str]:
        """What users call and read; the rest is for headgate's own modules."""
        return sorted(_PUBLIC)

    def __repr__(self) -> str:
        """The steps as they are written so far; `explain` says how they will run."""
        checkpoint = self.checkpoint_settings
        stores = f"checkpoints in {checkpoint.storage}" if checkpoint else "no checkpoints"
        head = f"Job {self.name}: parallelism {self.parallelism}, {stores}"
        steps = [f"  {describe_node(node)}" for node in self.graph.nodes]
        return "\n".join([head, *(steps or ["  no steps yet"])])

    def _show(self, stream: StreamBase[Any], rows: int, within_ms: int, origin: Origin) -> None:
        from .preview import preview, print_table

        try:
            found = preview(
                self.graph, self.options, self._part, stream._input(), rows, within_ms, origin
            )
        except InternalError:
            raise
        except HeadgateError as error:
            raise error.with_traceback(None) from _cause_of(error)
        print_table(found, stream.schema, format_duration(within_ms))

    def _part(self, graph: Graph, options: dict[str, str]) -> JobSpec:
        """A part of this job as a job of its own, without checkpoints and with parallelism 1."""
        part = copy.copy(self)
        part.graph, part.options = graph, options
        part.parallelism, part.checkpoint_settings, part.restart_settings = 1, None, None
        return part.spec()

    def override(self, options: Mapping[str, str]) -> None:
        """Put `options`, under their current keys, in the place of the job's own."""
        kept = {key: text for key, text in self.options.items() if current_key(key) not in options}
        self.options = {**kept, **options}

    def explain(self) -> str:
        """The logical and the physical graph, chains, key groups and guarantees, as text.

        Of a job that runs as a batch: Spark's plan, for which Spark is started.

        Raises:
            UsageError: the job is wrong as written.
        """
        try:
            spec = self.spec()
        except UsageError as error:
            raise error.with_traceback(None) from error.__cause__
        if not self.as_batch:
            return explain_plan(spec)
        from .batch.run import explain_batch

        return explain_batch(spec)

    def problems(self) -> Iterator[PlanError]:
        """Every reason why the job cannot run as a whole, with its options taken into account."""
        options = self._settle()
        yield from super().problems()
        storage = None if self.checkpoint_settings is None else self.checkpoint_settings.storage
        yield from missing_packages(self.graph, options, storage, self.as_batch)
        yield from unshippable(self.graph)
        if self.as_batch:
            yield from batch_problems(self.graph)
        elif options.get(CHECKPOINT_MODE) != "EXACTLY_ONCE":
            yield from _promises_without_alignment(self.graph)

    def _settle(self) -> Options:
        """Check the options, and put those explicitly set in the place of what the program says."""
        options = Options(self.options)
        if options.is_set(PARALLELISM):
            self.parallelism = options.get(PARALLELISM)
        if options.is_set(MAX_PARALLELISM):
            self.max_parallelism = options.get(MAX_PARALLELISM)
        self.checkpoint_settings = _checkpoint_settings(self.checkpoint_settings, options)
        checkpoint_rules(self.checkpoint_settings, options)  # raises here, and not on the cluster
        self.as_batch = runs_as_batch(self.graph, options)
        return options

    def spec(
        self,
        *,
        fresh: bool = False,
        allow_non_restored_state: bool = False,
        restore_from: str | os.PathLike[str] | None = None,
        claim: bool = False,
        take_over: bool = False,
        if_exists: IfExistsLike | None = None,
    ) -> JobSpec:
        """The checked job as it is handed to a coordinator; the arguments are those of `run`.

        Raises:
            UsageError: the job is wrong as written.
        """
        options = self._settle()
        path = options.get(RECOVERY_PATH) if restore_from is None else os.fspath(restore_from)
        if fresh and path:
            raise UsageError(
                "a run cannot both start fresh and restore something",
                fix="leave out --fresh: a run that restores a savepoint is a new one anyway",
            )
        if self.as_batch and path:
            raise UsageError(
                "a batch begins with nothing, and cannot restore something",
                fix=f"leave out the savepoint, or {RUNTIME_MODE.key}=BATCH",
            )
        if claim and not path:
            raise UsageError(
                "there is nothing to claim", fix="name a savepoint with --from, or restore_from="
            )
        graph = self.plan()
        if any(node.kind == "process" for node in graph.nodes):
            check_state_backend(options.effective())
        plan = make_plan(
            graph,
            job_name=self.name,
            parallelism=self.parallelism,
            max_parallelism=self.max_parallelism,
            chaining=options.get(CHAINING),
        )
        check_pickles(plan, graph, options)
        return JobSpec(
            name=self.name,
            plan=plan,
            parallelism=self.parallelism,
            checkpoint=self.checkpoint_settings,
            restart=restart_settings(
                self.restart_settings, options, self.checkpoint_settings is not None
            ),
            options=_travelling(options),
            graph=graph,
            max_parallelism=self.max_parallelism,
            chaining=options.get(CHAINING),
            run=secrets.token_hex(8),
            fresh=fresh,
            allow_non_restored_state=(
                allow_non_restored_state or options.get(RECOVERY_IGNORE_UNCLAIMED)
            ),
            restore_from=absolute(path) if path else "",
            take_over=take_over,
            claim=claim or options.get(RECOVERY_CLAIM_MODE) == "CLAIM",
            if_exists=None if if_exists is None else parse_if_exists(if_exists),
        )


def _cause_of(error: HeadgateError) -> BaseException | None:
    """What a user's function raised, if the error is of one; else what it had as its cause."""
    if isinstance(error, UserCodeError) and error.detail:
        return UserTraceback(error.detail)
    return error.__cause__


def _checkpoint_settings(
    written: CheckpointSettings | None, options: Options
) -> CheckpointSettings | None:
    """What `job.checkpoint(...)` said, with explicitly set options in its place."""
    storage = options.get(CHECKPOINT_DIR) or (written.storage if written else None)
    if storage is None:
        return None
    interval = options.get(CHECKPOINT_INTERVAL)
    every_ms = interval if interval is not None else (written.every_ms if written else None)
    settings = replace(
        written or CheckpointSettings(every_ms=every_ms, storage=storage),
        every_ms=every_ms,
        storage=absolute(storage),
    )
    changed: dict[str, Any] = {
        name: options.get(option)
        for name, option in _CHECKPOINT_FIELDS.items()
        if options.is_set(option)
    }
    return replace(settings, **changed)


def absolute(storage: str) -> str:
    """A relative directory as seen from here: workers may run elsewhere."""
    return storage if "://" in storage else os.path.abspath(Path(storage).expanduser())


def _travelling(options: Options) -> dict[str, str]:
    """The options as other processes are to understand them."""
    texts = options.explicit()
    if directory := options.get(SAVEPOINT_DIR):
        texts[SAVEPOINT_DIR.key] = absolute(directory)
    return texts


def _log_event(event: Event) -> None:
    """A job on a cluster runs in other processes: what it announces goes to the log of this one."""
    if event.kind not in ("progress", "ended"):
        level = logging.WARNING if event.kind in WARNINGS else logging.INFO
        _log.log(level, "%s", event.text)


def _promises_without_alignment(graph: Graph) -> Iterator[PlanError]:
    """The sinks that promise more than checkpoints of mode AT_LEAST_ONCE can give."""
    for node in graph.sinks():
        if node.sink is not None and node.sink.guarantee is Guarantee.EXACTLY_ONCE:
            yield PlanError(
                f"sink `{node.name}` promises exactly_once, and {CHECKPOINT_MODE.key}=`AT_LEAST_ONCE` "
                "lets records count twice after a failure",
                where=str(node.origin),
                fix='say guarantee="at_least_once" at the sink, or leave out the option',
            )
