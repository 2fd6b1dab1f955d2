"""A job as it is written: its public face, and the nodes, names, settings and checks inside it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import ClassVar, Final

from ..errors import PlanError, UsageError
from ..operators.addresses import STORAGE_SCHEMES, check_address
from ..operators.durations import Duration, parse_duration
from ..operators.graph import PRE_AGGREGATION_OPTION, Graph, Node
from ..operators.origin import Origin, capture_origin
from ..operators.partitioning import Global
from ..operators.queries import check_unique
from ..operators.sink import Guarantee
from ..operators.source import REJECTED, Record, Source
from ..operators.whole_numbers import check_whole_number
from ..state.keygroups import check_max_parallelism, default_max_parallelism
from .node_output import NodeOutput
from .optimize import optimize
from .required_name import named
from .resources import DEFAULT_GROUP, Resources, checked_groups, sharing_groups
from .restarts import fixed_delay
from .settings import CheckpointSettings, ExponentialDelay, FailureRate, FixedDelay, RestartSettings
from .stream import Stream

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_STEP_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._ -]*")
NAME_LENGTH_MAX: Final = 100
"""Names become parts of file names in the checkpoint store."""


class JobDefinition:
    """The nodes of a job in the order they were written, its settings, and the checks of the whole job.

    The arguments are those of `WrittenJob`.
    """

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
        _check_name(name, _NAME, "job", capture_origin())
        self.name = name
        self.parallelism = check_whole_number("parallelism", parallelism, capture_origin())
        if max_parallelism is not None:
            check_whole_number("max_parallelism", max_parallelism, capture_origin())
        if not isinstance(options, Mapping | None):
            raise PlanError(
                f"options of a job are a mapping, got `{type(options).__name__}`",
                where=str(capture_origin()),
                fix='such as options={"parallelism.default": "2"}; `headgate options` lists the keys',
            )
        self.max_parallelism = max_parallelism
        self.options: dict[str, str] = {str(key): str(v) for key, v in (options or {}).items()}
        self.labels: dict[str, str] = {str(key): str(v) for key, v in (labels or {}).items()}
        self.resources: dict[str, Resources] = {}
        """The slot sharing groups that are declared, with the resources of a slot."""
        self._declared: dict[str, Origin] = {}
        """Where they are."""
        self.declare_groups(resources or {})
        self.graph = Graph()
        self.checkpoint_settings: CheckpointSettings | None = None
        self.restart_settings: RestartSettings | None = None
        self.as_batch = False
        """True if the job runs as a batch, which needs no checkpoints."""
        self._by_name: dict[str, Node] = {}
        self._derived: set[int] = set()

    def declare_groups(self, resources: Mapping[str, Resources]) -> None:
        """Make slot sharing groups known, with the resources of a slot of each.

        Raises:
            PlanError: something is no name of a group, or no resources.
        """
        self.resources |= checked_groups(resources)
        self._declared |= dict.fromkeys(resources, capture_origin())

    def check_group(self, name: object, origin: Origin) -> str:
        """The name of a slot sharing group, as a step gives it.

        Raises:
            PlanError: no such group is declared.
        """
        known = sorted({DEFAULT_GROUP, *self.resources})
        if isinstance(name, str) and name in known:
            return name
        raise PlanError(
            f"no such slot sharing group name=`{name}`",
            where=str(origin),
            fix=f"declare it in the resources of the job, or name one of {', '.join(known)}",
        )

    def validate(self) -> None:
        """Check the whole job.

        Raises:
            PlanError: the first reason why it cannot run.
        """
        for problem in self.problems():
            raise problem

    def problems(self) -> Iterator[PlanError]:
        """Yield every reason why the job as a whole cannot run."""
        if not any(self.graph.sources()):
            yield PlanError(
                f"job `{self.name}` reads nothing", fix="add job.read(source, name=...)"
            )
        if not any(self.graph.sinks()):
            yield PlanError(
                f"job `{self.name}` writes nothing", fix="add stream.write(sink, name=...)"
            )
        yield from self._unused_groups()
        checks = [(self._check_parallelism, node) for node in self.graph.nodes]
        if not self.as_batch:
            checks += [(self._check_guarantee, node) for node in self.graph.sinks()]
            checks += [(self._check_storage, node) for node in self.graph.sources()]
        for check, node in checks:
            try:
                check(node)
            except PlanError as error:
                yield error

    def plan(self) -> Graph:
        """Return the checked and optimised graph to run; the job itself stays as written.

        Raises:
            PlanError: see `validate`.
        """
        self.validate()
        on = self.options.get(PRE_AGGREGATION_OPTION, "true").strip().lower() == "true"
        return optimize(self.graph, self.parallelism, pre_aggregates=on and not self.as_batch)

    def effective_max_parallelism(self) -> int:
        """Return the number of key groups: as given, or from the highest parallelism of the job."""
        if self.max_parallelism is not None:
            return self.max_parallelism
        highest = max((node.parallelism or 1 for node in self.graph.nodes), default=1)
        return default_max_parallelism(max(self.parallelism, highest))

    def add_node(self, node: Node) -> Node:
        """Add a node to the graph; an empty name is replaced by one made from its kind.

        Raises:
            PlanError: the name is taken or malformed.
        """
        if node.parallelism is not None:
            check_whole_number("parallelism", node.parallelism, node.origin)
        taken = {each.name: known.name for known in self.graph.nodes for each in known.queryable}
        check_unique(node.queryable, taken, node.name or node.kind, node.origin)
        node.id = len(self.graph.nodes)
        if node.name:
            _check_name(node.name, _STEP_NAME, node.kind, node.origin)
            self._free_name(node)
        else:
            node.name = self.derived_name(node.kind)
            self._derived.add(node.id)
        if any(isinstance(input_.partitioning, Global) for input_ in node.inputs):
            node.parallelism = 1
        self._by_name[node.name] = node
        self.graph.nodes.append(node)
        return node

    def derived_name(self, kind: str) -> str:
        """Return `filter`, `filter-2`, ...: the same for the same program."""
        name, count = kind, 1
        while name in self._by_name:
            count += 1
            name = f"{kind}-{count}"
        return name

    def show(self, output: NodeOutput, rows: int, within_ms: int, origin: Origin) -> None:
        """See `Stream.show`; the subclass in `runtime/job.py` can run a job."""
        raise PlanError("this job cannot be run", where=str(origin), fix="make it with hg.Job")

    def _free_name(self, node: Node) -> None:
        """Free the user's name: a derived name yields to it; another user-given one is an error."""
        holder = self._by_name.get(node.name)
        if holder is None:
            return
        if holder.id in self._derived:
            holder.name = self.derived_name(holder.kind)
            self._by_name[holder.name] = holder
            return
        raise PlanError(
            f"two steps are named `{node.name}`",
            where=f"{holder.origin}\n  at {node.origin}",
            fix="a name is the address of a step's state: give one of them another name",
        )

    def _check_parallelism(self, node: Node) -> None:
        try:
            check_max_parallelism(
                node.max_parallelism or self.effective_max_parallelism(),
                node.parallelism or self.parallelism,
            )
        except PlanError as error:
            raise PlanError(error.message, where=str(node.origin), fix=error.fix) from None

    def _unused_groups(self) -> Iterator[PlanError]:
        used = set(sharing_groups(self.graph).values())
        for name in self.resources.keys() - used:
            yield PlanError(
                f"no step is in the slot sharing group `{name}`",
                where=str(self._declared[name]),
                fix="name the group at a step, or remove its resources",
            )

    def _check_guarantee(self, node: Node) -> None:
        sink = node.sink
        if sink is None or sink.guarantee is Guarantee.NONE or self.checkpoint_settings is not None:
            return
        raise PlanError(
            f"sink `{node.name}` promises {sink.guarantee.value}, but the job takes no checkpoints",
            where=str(node.origin),
            fix='add job.checkpoint(every="10s", storage="..."), or give the sink guarantee="none"',
        )

    def _check_storage(self, node: Node) -> None:
        source = node.source
        if source is None or not source.needs_storage or self.checkpoint_settings is not None:
            return
        raise PlanError(
            f"source `{node.name}` keeps data in the job's storage, and the job has none",
            where=str(node.origin),
            fix='add job.checkpoint(every="10s", storage="...")',
        )


def _check_name(name: object, pattern: re.Pattern[str], what: str, origin: Origin) -> None:
    if isinstance(name, str) and pattern.fullmatch(name) and len(name) <= NAME_LENGTH_MAX:
        return
    raise PlanError(
        f"not a name for a {what} value=`{name}`",
        where=str(origin),
        fix="names start with a letter or digit and go on with letters, digits, `-`, `_` and `.`, "
        f"up to {NAME_LENGTH_MAX} characters",
    )


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
