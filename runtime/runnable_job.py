"""RunnableJob: a job's definition with its options taken into account, ready for a coordinator."""

from __future__ import annotations

import copy
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from typing import Final

from ..api.job_definition import JobDefinition
from ..api.node_output import NodeOutput
from ..errors import (
    HeadgateError,
    InternalError,
    PlanError,
    UsageError,
    UserCodeError,
    UserTraceback,
)
from ..operators.durations import format_duration
from ..operators.graph import Graph
from ..operators.origin import Origin
from ..operators.sink import IfExistsLike, parse_if_exists
from .job_checks import (
    batch_problems,
    check_pickles,
    missing_packages,
    runs_as_batch,
    sinks_that_cannot_wait,
    sinks_without_alignment,
    steps_apart_from_source,
)
from .job_spec import JobSpec, absolute, checkpoint_rules, checkpoint_settings, restart_settings
from .options.execution import CHAINING, MAX_PARALLELISM, PARALLELISM, RUNTIME_MODE
from .options.registry import Options, current_key
from .options.state import (
    CHECKPOINT_MODE,
    RECOVERY_CLAIM_MODE,
    RECOVERY_IGNORE_UNCLAIMED,
    RECOVERY_PATH,
    SAVEPOINT_DIR,
)
from .plan import make_plan
from .shipping import unshippable

RUN_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class RunnableJob(JobDefinition):
    """A definition that can be checked as a whole, previewed, and handed to a coordinator."""

    def override(self, options: Mapping[str, str]) -> None:
        """Put `options`, under their current keys, in the place of the job's own."""
        kept = {key: text for key, text in self.options.items() if current_key(key) not in options}
        self.options = {**kept, **options}

    def problems(self) -> Iterator[PlanError]:
        """Every reason why the job cannot run as a whole, with its options taken into account."""
        options = self._apply_options()
        yield from super().problems()
        storage = None if self.checkpoint_settings is None else self.checkpoint_settings.storage
        yield from missing_packages(self.graph, options, storage, self.as_batch)
        yield from unshippable(self.graph)
        yield from steps_apart_from_source(self.graph)
        if self.as_batch:
            yield from batch_problems(self.graph)
            return
        if options.get(CHECKPOINT_MODE) != "EXACTLY_ONCE":
            yield from sinks_without_alignment(self.graph)
        rules = checkpoint_rules(self.checkpoint_settings, options)
        yield from sinks_that_cannot_wait(self.graph, rules)

    def _apply_options(self) -> Options:
        """Check the options, and put those explicitly set in the place of what the program says."""
        options = Options(self.options)
        if options.is_set(PARALLELISM):
            self.parallelism = options.get(PARALLELISM)
        if options.is_set(MAX_PARALLELISM):
            self.max_parallelism = options.get(MAX_PARALLELISM)
        self.checkpoint_settings = checkpoint_settings(self.checkpoint_settings, options)
        checkpoint_rules(self.checkpoint_settings, options)  # raises here, and not on the cluster
        self.as_batch = runs_as_batch(self.graph, options)
        return options

    def _check_run_id(self, run_id: str) -> None:
        if not RUN_ID.fullmatch(run_id):
            raise UsageError(
                f"not a run id run id=`{run_id[:200]}`",
                fix="write 1 to 128 letters, digits, `.`, `_`, `:` and `-`, such as a uid and a revision",
            )
        if self.as_batch or self.checkpoint_settings is None:
            raise UsageError(
                "a run id needs checkpoints: without a job log nobody can tell a restart from a second run",
                fix="give the job checkpoint storage, or leave the run id out",
            )

    def spec(
        self,
        *,
        fresh: bool = False,
        allow_non_restored_state: bool = False,
        restore_from: str | os.PathLike[str] | None = None,
        claim: bool = False,
        take_over: bool = False,
        if_exists: IfExistsLike | None = None,
        run_id: str | None = None,
    ) -> JobSpec:
        """Return the checked job for a coordinator; the arguments are those of `run`.

        Raises:
            UsageError: the job is wrong as written.
        """
        options = self._apply_options()
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
        if run_id is not None:
            self._check_run_id(run_id)
        if claim and not path:
            raise UsageError(
                "there is nothing to claim", fix="name a savepoint with --from, or restore_from="
            )
        graph = self.plan()
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
            labels=dict(self.labels),
            resources=dict(self.resources),
            max_parallelism=self.max_parallelism,
            chaining=options.get(CHAINING),
            run=secrets.token_hex(8) if run_id is None else run_id,
            outside_run=run_id is not None,
            fresh=fresh,
            allow_non_restored_state=(
                allow_non_restored_state or options.get(RECOVERY_IGNORE_UNCLAIMED)
            ),
            restore_from=absolute(path) if path else "",
            take_over=take_over,
            claim=claim or options.get(RECOVERY_CLAIM_MODE) == "CLAIM",
            if_exists=None if if_exists is None else parse_if_exists(if_exists),
        )

    def show(self, output: NodeOutput, rows: int, within_ms: int, origin: Origin) -> None:
        from .preview import preview, print_table

        try:
            found = preview(
                self.graph, self.options, self._part, output.as_input(), rows, within_ms, origin
            )
        except InternalError:
            raise
        except HeadgateError as error:
            raise error.with_traceback(None) from cause_of(error)
        print_table(found, output.schema, format_duration(within_ms))

    def _part(self, graph: Graph, options: dict[str, str]) -> JobSpec:
        """A part of this job as a job of its own, without checkpoints and with parallelism 1."""
        part = copy.copy(self)
        part.graph, part.options = graph, options
        part.parallelism, part.checkpoint_settings, part.restart_settings = 1, None, None
        part.resources = {}
        return part.spec()


def _travelling(options: Options) -> dict[str, str]:
    """The options for other processes, whose working directory may be another."""
    texts = options.explicit()
    if directory := options.get(SAVEPOINT_DIR):
        texts[SAVEPOINT_DIR.key] = absolute(directory)
    return texts


def cause_of(error: HeadgateError) -> BaseException | None:
    """The exception a user's function raised, if that is what the error reports; else its own cause."""
    if isinstance(error, UserCodeError) and error.detail:
        return UserTraceback(error.detail)
    return error.__cause__
