"""Builds a job from a checked manifest through the fluent API, with the same checks as Python code.

The build does not stop at the first mistake. A step that fails is reported with its line, and
whatever is known about its result is used to check the steps after it. If nothing is known about a
stream (None), the steps that read it are checked on their own, and nothing is reported twice.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from functools import partial
from graphlib import CycleError, TopologicalSorter
from typing import Any, Final, TypeAlias, TypeVar

import pyarrow as pa

from ...errors import HeadgateError
from ...operators.async_calls.map_async import TIMED_OUT
from ...operators.functions.dead_letters import FAILED
from ...operators.origin import Origin, capture_origin, origin_is
from ...operators.schema import to_schema
from ...operators.sink import Guarantee, Sink
from ...operators.source import REJECTED, Source
from ...operators.suggestions import suggest
from ..job_definition import JobDefinition, WrittenJob, definition_of
from ..stream import Stream
from .document import Problems, Value, load
from .event_times import with_event_time
from .fields import INVALID, Table
from .groups import check_worker_groups
from .kubernetes_model import check_rules
from .model import manifest_section
from .references import resolve_class
from .registry import (
    LookupConnector,
    SinkConnector,
    SourceConnector,
    SourceSpec,
    Toolbox,
    lookups_of,
)
from .settings import apply_settings, declare_groups, has_checkpoints, job_arguments, may_be_batch
from .step import Step
from .steps import inputs_of, partitioned, plan_step

Flow: TypeAlias = Stream[Any] | None
"""A stream; None if the step that makes it is wrong, which has been reported."""

R = TypeVar("R")
GROUP: Final = "slotSharingGroup"
_log = logging.getLogger(__name__)


def build_job(text: str, file: str, variables: Mapping[str, str], toolbox: Toolbox) -> WrittenJob:
    """Build the job of the manifest `text`; `file` is its name in messages.

    Raises:
        ManifestErrors: all mistakes, each with its line. Nothing was started or opened.
    """
    problems = Problems(file)
    root = load(text, problems, variables)
    job = None if root is None else ManifestBuilder(root, text, problems, toolbox).build()
    problems.raise_if_any()
    if job is None:
        raise ValueError("a manifest without a job and without a problem")
    return job


class ManifestBuilder:
    """Builds one job. Every step that may be wrong is made by `attempt`."""

    def __init__(self, root: Value, text: str, problems: Problems, toolbox: Toolbox) -> None:
        self.problems = problems
        self._lines = text.splitlines()
        self._toolbox = toolbox
        section = manifest_section(toolbox.sources, toolbox.sinks)
        table = section.read(root, root.line, problems)
        self._root: Table = Table(root.line) if table is INVALID else table
        self._spec = self._section(self._root, "spec")
        self._sources = self._section(self._spec, "sources")
        self._operators = self._section(self._spec, "operators")
        self._sinks = self._section(self._spec, "sinks")
        self._checkpoints = has_checkpoints(self._spec, toolbox)
        self._flows: dict[str, Flow] = {}
        self._roots: dict[str, Flow] = {}
        """Streams before their event time, which have the side outputs."""
        self._read: set[str] = set()
        self._misread: set[str] = set()
        """Sources and operators of which a missing side output is read: it may be meant for an
        unread one."""

    def _section(self, table: Table, name: str) -> Table:
        section = table.get(name)
        return section if isinstance(section, Table) else Table(table.line_of(name))

    def attempt(self, line: int, action: Callable[[], R]) -> R | None:
        """Return the result of `action`; if it raises, report a problem at `line` and return None.

        Nodes that it makes originate from `line`.
        """
        text = self._lines[line - 1].strip() if line <= len(self._lines) else ""
        try:
            with origin_is(Origin(self.problems.where(line), text)):
                return action()
        except HeadgateError as error:
            self.problems.add(line, error.message, error.fix)
            return None

    def build(self) -> WrittenJob | None:
        self._check_names()
        check_rules(self._section(self._spec, "kubernetes"), self.problems)
        check_worker_groups(self._spec, self.problems)
        metadata = self._section(self._root, "metadata")
        arguments = job_arguments(self._spec, self._toolbox, self.problems)
        name = metadata.get("name", "unnamed")
        job = self.attempt(self._spec.line, lambda: self._toolbox.new_job(name, **arguments))
        if job is None:
            return None
        labels = self._section(metadata, "labels")
        job.labels.update({name: str(value) for name, value in labels.values.items()})
        apply_settings(job, self._spec, self)
        declare_groups(job, self._spec, self)
        self._check_groups(job)
        self._checkpoints = self._checkpoints or may_be_batch(job)
        for source in self._sources.lines:
            self._flows[source] = self._source(job, source)
        self._add_operators()
        for sink in self._sinks.lines:
            self._sink(sink)
        self._check_unread()
        self._check_whole(job)
        return job

    def _check_names(self) -> None:
        """Check that names, which are addresses of state, are unique among sources, operators and sinks."""
        seen: dict[str, int] = {}
        for table in (self._sources, self._operators, self._sinks):
            for name, line in table.lines.items():
                if name in seen:
                    self.problems.add(
                        line,
                        f"name is used twice name=`{name}`",
                        f"it is used in line {seen[name]} already; rename one",
                    )
                seen.setdefault(name, line)

    def _check_groups(self, job: WrittenJob) -> None:
        """Each step names a slot sharing group that is declared; others are noted, and left out."""
        definition = definition_of(job)
        for table in (self._sources, self._operators, self._sinks):
            for step in table.values.values():
                group, line = step.get(GROUP), step.line_of(GROUP)
                if group is None:
                    continue
                known = self.attempt(line, partial(_known_group, definition, group))
                if known is None:
                    del step.values[GROUP]
                elif step.tried("iterate"):
                    self.problems.add(
                        line,
                        "a loop is in the slot sharing group of its input",
                        f'name another one in its body: stream.slot_sharing_group("{group}")',
                    )

    def _check_unread(self) -> None:
        """Report unread rejected records, which would be lost silently, and warn of unread results."""
        for name, source in self._sources.values.items():
            unread = f"{name}.{REJECTED}" not in self._read and name not in self._misread
            if source.get("onBadRecord") == "side_output" and unread:
                self.problems.add(
                    source.line_of("onBadRecord"),
                    f"nobody reads `{name}.{REJECTED}`",
                    f"write it to a sink (from: {name}.{REJECTED}), or say onBadRecord: drop",
                )
        for name, operator in self._operators.values.items():
            for field, side in (("onError", FAILED), ("onTimeout", TIMED_OUT)):
                read = f"{name}.{side}" in self._read or name in self._misread
                if _asks_for_side(operator.get(field)) and not read:
                    self._note_unread(operator, field, f"{name}.{side}")
        for name, table in [*self._sources.values.items(), *self._operators.values.items()]:
            self._check_times_apart(name, table)
        for name in self._flows:
            if not self.problems.found and name not in self._read:
                line = self._sources.lines.get(name) or self._operators.line_of(name)
                _log.warning("nobody reads `%s` at %s", name, self.problems.where(line))

    def _note_unread(self, table: Table, field: str, stream: str) -> None:
        self.problems.add(
            table.line_of(field),
            f"nobody reads `{stream}`",
            f"write it to a sink (from: {stream}), or do not use side_output",
        )

    def _check_times_apart(self, name: str, table: Table) -> None:
        """Check that the records set aside by `eventTime` are read, and that no output shares their
        name."""
        if not _asks_for_side(_on_error_of_time(table)):
            return
        event_time = table.get("eventTime")
        if _asks_for_side(table.get("onError")):
            self.problems.add(
                event_time.line_of("onError"),
                f"both the step and its eventTime send records to `{name}.{FAILED}`",
                "give eventTime to a step of its own behind this one",
            )
        elif f"{name}.{FAILED}" not in self._read and name not in self._misread:
            self._note_unread(event_time, "onError", f"{name}.{FAILED}")

    def _check_whole(self, job: WrittenJob) -> None:
        """Check what needs the complete job; pointless while parts of it are missing."""
        if self.problems.found:
            return
        for problem in definition_of(job).problems():
            here = re.compile(re.escape(self.problems.file) + r":(\d+).*")
            at = here.search(problem.where)
            # A problem may have a second place, in code that the manifest names.
            others = [each for each in problem.where.split("\n  at ") if not here.match(each)]
            message = "\n  at ".join([problem.message, *filter(None, others)])
            self.problems.add(int(at[1]) if at else self._spec.line, message, problem.fix)

    # sources

    def _source(self, job: WrittenJob, name: str) -> Flow:
        table = self._sources.get(name)
        if table is None:
            return None
        made = self._made(table, name, "source", self._toolbox.sources)
        if made is None:
            return None
        root = self.attempt(table.line, lambda: job.read(made, name=name))
        return self._timed(name, self._grouped(self._parallel(root, table), table), table)

    def lookup_connectors(self) -> Mapping[str, LookupConnector]:
        """Return the places in which a `lookup` can look rows up by key."""
        return lookups_of(self._toolbox.sources)

    def files_of(self, table: Table, name: str) -> Source | None:
        """Return the source of the table of operator `name`; None if it is wrong and reported."""
        files = {
            known: connector
            for known, connector in self._toolbox.sources.items()
            if connector.tables
        }
        return self._made(table, name, "table", files)

    def _made(
        self, table: Table, name: str, what: str, connectors: Mapping[str, SourceConnector]
    ) -> Source | None:
        """Return the result of the one connector in `table`; messages call it `what`."""
        chosen = self._one_connector(table, name, what, connectors)
        if chosen is None:
            return None
        connector = connectors[chosen]
        complete = self._check_source(table, name, what, chosen, connector)
        schema = self.schema_of(table) if table.tried("schema") else None
        fields = table.get(chosen)
        if fields is None or fields.wrong or not complete or (table.tried("schema") and not schema):
            return None
        spec = SourceSpec(schema, table.get("onBadRecord"))
        return self.attempt(table.line_of(chosen), lambda: connector.make(fields.values, spec))

    def _timed(self, name: str, root: Flow, table: Table) -> Flow:
        """Return the stream with its event time, at the parallelism of the step that makes it."""
        self._roots[name] = root
        timed = self._event_time(name, root, table)
        return timed if timed is root else self._parallel(timed, table)

    def _check_source(
        self, table: Table, name: str, what: str, chosen: str, connector: SourceConnector
    ) -> bool:
        """Return whether the connector supports the fields beside it."""
        if table.tried("onBadRecord") and not connector.bad_records:
            self.problems.add(
                table.line_of("onBadRecord"),
                f"{chosen} has no unreadable records {what}=`{name}`",
                "remove onBadRecord",
            )
        if table.tried("schema") and connector.schema == "refused":
            self.problems.add(
                table.line_of("schema"),
                f"{chosen} makes its own schema {what}=`{name}`",
                "remove schema",
            )
            return False
        if not table.tried("schema") and connector.schema == "required":
            self.problems.add(
                table.line, f"{what} has no schema {what}=`{name}`", "schema: {column: type, ...}"
            )
            return False
        return True

    def schema_of(self, table: Table, name: str = "schema") -> pa.Schema | type[Any] | None:
        """Return a schema given as columns, as a source that has the same one, or as a class."""
        described, line = table.get(name), table.line_of(name)
        if isinstance(described, Table):
            if described.bad:
                return None
            return self.attempt(line, lambda: to_schema(described.values))
        if described is None:
            return None
        if ":" in described:
            return self.attempt(line, lambda: resolve_class(described))
        other = self._sources.get(described)
        if other is None:
            if not self._sources.tried(described):
                known = suggest(described, self._sources.lines, "sources")
                self.problems.add(line, f"no such source name=`{described}`", known)
            return None
        if not isinstance(other.get("schema"), Table):
            self.problems.add(line, f"source `{described}` has no list of columns to share")
            return None
        return self.schema_of(other)

    def _event_time(self, name: str, flow: Flow, table: Table) -> Flow:
        event_time = table.get("eventTime")
        if flow is None or event_time is None:
            return flow if not table.tried("eventTime") else None
        return with_event_time(flow, event_time, name, self)

    # operators

    def _add_operators(self) -> None:
        inputs: dict[str, list[tuple[str, int]]] = {}
        for name, table in self._operators.values.items():
            if name in self._sources.lines:
                plan_step(name, table, self)  # its name is wrong; the rest may be right
            else:
                inputs[name] = inputs_of(table)
        for name in self._ordered(inputs):
            table = self._operators.values[name]
            step = plan_step(name, table, self)
            flows = [self._flow(at, line) for at, line in inputs[name]]
            self._flows[name] = None
            if step is not None and flows and all(flow is not None for flow in flows):
                self._flows[name] = self._apply(name, table, step, flows)
        for name in self._operators.bad:
            self._flows.setdefault(name, None)

    def _apply(self, name: str, table: Table, step: Step, flows: list[Any]) -> Flow:
        routed = [partitioned(flow, table, self) for flow in flows]
        spread = [flow for flow in routed if flow is not None]
        if len(spread) < len(flows):
            return None
        made = step(spread)
        # The parallelism and group of `iterate` are those of the loop, not of the step after it.
        if not table.tried("iterate"):
            made = self._grouped(self._parallel(made, table), table)
        if made is not None and (chaining := table.get("chaining")):
            chained = made.start_new_chain if chaining == "head" else made.disable_chaining
            made = self.attempt(table.line_of("chaining"), chained)
        return self._timed(name, made, table)

    def _ordered(self, inputs: Mapping[str, list[tuple[str, int]]]) -> list[str]:
        """Return the operators so that each follows those it reads. Those of a cycle are reported
        and left out."""
        # Lists, not sets: the order must not depend on the hash seed.
        graph = {
            name: [read for at, _ in reads if (read := at.partition(".")[0]) in inputs]
            for name, reads in inputs.items()
        }
        while True:
            try:
                return [name for name in TopologicalSorter(graph).static_order() if name in graph]
            except CycleError as error:
                cycle: list[str] = error.args[1][::-1]
                first = min(cycle, key=self._operators.line_of)
                place = cycle.index(first)
                path = " -> ".join([*cycle[place:-1], *cycle[:place], first])
                self.problems.add(
                    self._operators.line_of(first),
                    f"operators read each other in a circle path=`{path}`",
                    "let one of them read something else",
                )
                for name in cycle:
                    graph.pop(name, None)
                    self._flows[name] = None
                graph = {
                    name: [read for read in reads if read in graph] for name, reads in graph.items()
                }

    def _flow(self, at: str, line: int) -> Flow:
        """Return the stream that `from` names: of a source or operator, or its side output."""
        name, _, side = at.partition(".")
        self._read.add(name)
        if name not in self._flows:
            known = suggest(name, [*self._sources.lines, *self._operators.lines], "streams")
            what = "a sink cannot be read" if name in self._sinks.lines else "no such stream"
            self.problems.add(line, f"{what} name=`{name}`", known)
            return None
        if not side:
            return self._flows[name]
        root = self._flows[name] if self._is_of_event_time(name, side) else self._roots.get(name)
        if root is None or not self._comes_out(name, side, line):
            return None
        self._read.add(at)
        found = self.attempt(line, lambda: root.side(side))
        if found is None:
            self._misread.add(name)
        return found

    def _comes_out(self, name: str, side: str, line: int) -> bool:
        """Return True if a source emits rejected records; otherwise report a problem and return False."""
        source = self._sources.get(name)
        if source is None or side != REJECTED:
            return True
        policy = source.get("onBadRecord", "side_output" if source.tried("onBadRecord") else "fail")
        if policy != "side_output":
            self.problems.add(
                line,
                f"nothing comes out of `{name}.{side}` onBadRecord=`{policy}`",
                f"say onBadRecord: side_output in `{name}`",
            )
        return bool(policy == "side_output")

    def _is_of_event_time(self, name: str, side: str) -> bool:
        """Return True for the side output of `eventTime` with the records without a time."""
        table = self._sources.get(name) or self._operators.get(name)
        return side == FAILED and table is not None and _asks_for_side(_on_error_of_time(table))

    def _parallel(self, flow: Flow, table: Table) -> Flow:
        parallelism = table.get("parallelism")
        if flow is None or parallelism is None:
            return flow
        set_ = self.attempt(table.line_of("parallelism"), lambda: flow.parallel(parallelism))
        return set_ or flow

    def _grouped(self, flow: Flow, table: Table) -> Flow:
        group = table.get(GROUP)
        if flow is None or group is None:
            return flow
        set_ = self.attempt(table.line_of(GROUP), lambda: flow.slot_sharing_group(group))
        return set_ or flow

    # sinks

    def _sink(self, name: str) -> None:
        table = self._sinks.get(name)
        if table is None:
            return
        sink = self._make_sink(table, name)
        at = table.get("from")
        flow = None if at is None else self._flow(at, table.line_of("from"))
        if flow is None or sink is None:
            return
        spread = partitioned(flow, table, self)
        chosen = table.present(list(self._toolbox.sinks))[0]
        if spread is not None:
            parallelism, group = table.get("parallelism"), table.get(GROUP)
            self.attempt(
                table.line_of(chosen),
                lambda: spread.write(
                    sink, name=name, parallelism=parallelism, slot_sharing_group=group
                ),
            )

    def _make_sink(self, table: Table, name: str) -> Sink | None:
        chosen = self._one_connector(table, name, "sink", self._toolbox.sinks)
        if chosen is None:
            return None
        connector = self._toolbox.sinks[chosen]
        guarantee = self._guarantee(table, name, chosen, connector)
        fields = table.get(chosen)
        if fields is None or fields.bad:
            return None
        line = table.line_of(chosen)
        sink = self.attempt(line, lambda: connector.make(fields.values, guarantee))
        if sink is not None and sink.guarantee is not Guarantee.NONE and not self._checkpoints:
            self.problems.add(
                table.line_of("guarantee"),
                f"sink `{name}` promises {sink.guarantee.value}, but the job takes no checkpoints",
                "add checkpoint: {every: 10s, storage: ...} to spec, or say guarantee: none",
            )
        return sink

    def _guarantee(
        self, table: Table, name: str, chosen: str, connector: SinkConnector
    ) -> str | None:
        """Return the guarantee asked for; if it is wrong, one that is possible."""
        words = [kind.value for kind in Guarantee if kind in connector.guarantees]
        wanted: str | None = table.get("guarantee")
        if wanted in words:
            return wanted
        if wanted is not None:
            self.problems.add(
                table.line_of("guarantee"),
                f"{chosen} cannot promise `{wanted}` sink=`{name}`",
                f"use one of {', '.join(words)}, or another sink",
            )
        elif connector.guarantee_required and not table.tried("guarantee"):
            self.problems.add(
                table.line,
                f"sink has no guarantee sink=`{name}`",
                f"guarantee: {' | '.join(words)}",
            )
        elif not table.tried("guarantee"):
            return None
        return words[-1]

    def _one_connector(
        self, table: Table, name: str, what: str, connectors: Mapping[str, Any]
    ) -> str | None:
        """Return the connector that a source or sink names; exactly one is right."""
        named = table.present(list(connectors))
        if len(named) == 1:
            return named[0]
        if named:
            self.problems.add(
                table.line_of(named[1]),
                f"{what} has more than one connector {what}=`{name}`: {', '.join(named)}",
                "keep one",
            )
        elif not table.strange:
            self.problems.add(
                table.line,
                f"{what} has no connector {what}=`{name}`",
                f"name one of {', '.join(connectors)}",
            )
        return None


def _known_group(definition: JobDefinition, group: str) -> str:
    return definition.check_group(group, capture_origin())


def _on_error_of_time(table: Table) -> Any:
    event_time = table.get("eventTime")
    return event_time.get("onError") if isinstance(event_time, Table) else None


def _asks_for_side(said: Any) -> bool:
    """Return True if `onError` or `onTimeout` sends records to a side output."""
    return "side_output" in (said, said.get("then") if isinstance(said, Table) else None)
