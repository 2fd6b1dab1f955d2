"""The slot sharing groups of a manifest, as far as they can be known without the user's code.

An operator makes worker pods by them. The plan of the job, which only a process with the user's code can
make, may differ in the body of a loop alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..resources import DEFAULT_GROUP
from .document import Problems
from .fields import Table
from .steps import inputs_of


@dataclass(frozen=True, slots=True)
class GroupWidth:
    """The number of slots that a group needs.

    Attributes:
        own: the highest parallelism that one of its steps sets for itself.
        follows: one of its steps has the parallelism of the job.
    """

    own: int = 0
    follows: bool = False

    def at(self, parallelism: int) -> int:
        """Slots of the group if the job has this parallelism."""
        return max(self.own, parallelism if self.follows else 0)


def group_widths(spec: Table) -> dict[str, GroupWidth]:
    """The width of each slot sharing group that has steps, or is declared; the default one first.

    A declared group without a step has one in the body of a loop, and is as wide as the job.
    """
    steps: dict[str, Table] = {}
    for section in ("sources", "operators", "sinks"):
        steps |= getattr(spec.get(section), "values", {})
    groups: dict[str, str] = {}
    widths: dict[str, GroupWidth] = {}
    for name, table in steps.items():
        group = _group_of(name, steps, groups)
        before, own = widths.get(group, GroupWidth()), _parallelism(table)
        widths[group] = GroupWidth(max(before.own, own or 0), before.follows or own is None)
    for name in getattr(spec.get("resources"), "lines", {}):
        widths.setdefault(name, GroupWidth(follows=True))
    if DEFAULT_GROUP in widths:
        # Steps that are added between others set no parallelism of their own.
        widths[DEFAULT_GROUP] = GroupWidth(widths[DEFAULT_GROUP].own, follows=True)
    return dict(sorted(widths.items(), key=lambda each: (each[0] != DEFAULT_GROUP, each[0])))


def _parallelism(table: Table) -> int | None:
    """The number of subtasks that a step sets for itself; None: it has that of the job."""
    own: int | None = table.get("parallelism")
    return 1 if own is None and table.get("partition") == "global" else own


def _group_of(name: str, steps: Mapping[str, Table], groups: dict[str, str]) -> str:
    """The group of a step: as it says, or that of all its inputs, or the default one."""
    if name not in groups:
        groups[name] = DEFAULT_GROUP  # of steps that read each other in a circle
        table = steps[name]
        before = {_group_of(each, steps, groups) for each in _inputs(table) if each in steps}
        inherited = before.pop() if len(before) == 1 else DEFAULT_GROUP
        groups[name] = table.get("slotSharingGroup") or inherited
    return groups[name]


def _inputs(table: Table) -> list[str]:
    """The names of the steps that a step reads."""
    return [stream.partition(".")[0] for stream, _ in inputs_of(table)]


def check_worker_groups(spec: Table, problems: Problems) -> None:
    """Note which entries of `kubernetes.workerGroups` belong to no slot sharing group."""
    kubernetes, declared = spec.get("kubernetes"), spec.get("resources")
    pods = kubernetes.get("workerGroups") if isinstance(kubernetes, Table) else None
    if not isinstance(pods, Table):
        return
    for name, line in pods.lines.items():
        if name == DEFAULT_GROUP:
            problems.add(
                line, f"the workers of the group `{name}` are in `workers`", "move them there"
            )
        elif not isinstance(declared, Table) or name not in declared.lines:
            fix = "declare it in the resources of the spec, or remove it"
            problems.add(line, f"no such slot sharing group name=`{name}`", fix)
