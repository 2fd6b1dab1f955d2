"""Slot sharing groups: which steps share slots, and what a slot of a group takes.

A slot hosts one subtask of each step of its group. Steps of different groups never share a slot, so a group
can have machines of its own. The names and the rules are Flink's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, final

from ..errors import PlanError, UsageError
from ..operators.graph import Graph
from ..operators.origin import capture_origin
from ..operators.sizes import format_size, parse_size

DEFAULT_GROUP: Final = "default"
"""The slot sharing group of steps that have no other."""
GROUP_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,28}[a-z0-9])?")
GROUP_NAME_MEANING: Final = "a name of at most 30 lower-case letters, digits and `-`"
"""A group names Kubernetes objects too, behind the name of its job."""
AMOUNT_MIN: Final = 0.0001
"""The least amount of a resource other than none; Ray counts in such parts."""
AMOUNT_MAX: Final = 1_000_000
_RESERVED: Final = frozenset({"cpu", "gpu", "memory", "object_store_memory"})


@final
@dataclass(frozen=True, slots=True)
class Resources:
    """The resources that one slot of a slot sharing group takes.

    A Ray cluster places the workers of the group where they are free. A run in one process, or on a Ray of
    its own, takes no notice of the amounts, and keeps the groups apart all the same.

    Args:
        cpu: number of CPUs; fractions are allowed.
        memory: a size with a unit, such as `"8gb"`.
        gpu: number of GPUs; a whole number, or a fraction below 1.
        custom: amounts of other resources of Ray's nodes, by name.

    Raises:
        PlanError: an amount is none.
    """

    cpu: float = 0
    memory: str = "0b"
    gpu: float = 0
    custom: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_amount("cpu", self.cpu)
        _check_amount("gpu", self.gpu)
        if self.gpu > 1 and self.gpu != int(self.gpu):
            raise _refused(f"gpu must be a whole number, or below 1 value=`{self.gpu}`")
        try:
            parse_size(self.memory, "memory")
        except UsageError as error:
            raise _refused(error.message, 'write it with its unit, such as memory="8gb"') from None
        if not isinstance(self.custom, Mapping):
            raise _refused(f"custom is a mapping, got `{type(self.custom).__name__}`")
        for name, amount in self.custom.items():
            if not isinstance(name, str) or not name.strip() or ":" in name:
                raise _refused(f"not a name for a resource value=`{name}`")
            if name.lower() in _RESERVED:
                raise _refused(f"`{name}` is no custom resource", f"write {name.lower()}=")
            _check_amount(f"custom resource `{name}`", amount)
            if amount > 1 and amount != int(amount):
                raise _refused(
                    f"custom resource `{name}` must be a whole number, or below 1 value=`{amount}`"
                )
        object.__setattr__(self, "custom", dict(self.custom))

    @property
    def memory_bytes(self) -> int:
        """The memory of a slot in bytes; 0: none is asked for."""
        return parse_size(self.memory)

    def __str__(self) -> str:
        """The amounts other than none, such as `2 CPUs, 8gb memory, 1 GPU`; empty if there are none."""
        parts = [_counted(self.cpu, "CPU")] if self.cpu else []
        parts += [f"{format_size(self.memory_bytes)} memory"] if self.memory_bytes else []
        parts += [_counted(self.gpu, "GPU")] if self.gpu else []
        parts += [f"{amount:g} {name}" for name, amount in sorted(self.custom.items()) if amount]
        return ", ".join(parts)


def _counted(amount: float, what: str) -> str:
    return f"{amount:g} {what}" if amount == 1 else f"{amount:g} {what}s"


def _check_amount(what: str, amount: object) -> None:
    if (
        isinstance(amount, bool)
        or not isinstance(amount, int | float)
        or not math.isfinite(amount)
        or (amount and amount < AMOUNT_MIN)
    ):
        raise _refused(f"{what} must be a number from 0 on value=`{amount!r}`")
    if amount > AMOUNT_MAX:
        raise _refused(f"{what} must be at most {AMOUNT_MAX:,} value=`{amount!r}`")


def _refused(message: str, fix: str = "") -> PlanError:
    return PlanError(f"resources: {message}", where=str(capture_origin()), fix=fix)


def checked_groups(resources: object) -> dict[str, Resources]:
    """The slot sharing groups of a job as its user declared them, by name.

    Raises:
        PlanError: something is no name, or no resources.
    """
    if not isinstance(resources, Mapping):
        raise _refused(
            f"of a job they are a mapping, got `{type(resources).__name__}`",
            'such as resources={"gpu": hg.Resources(gpu=1)}',
        )
    for name, each in resources.items():
        if not isinstance(name, str) or not GROUP_NAME.fullmatch(name):
            raise _refused(
                f"not a name for a slot sharing group value=`{name}`", GROUP_NAME_MEANING
            )
        if not isinstance(each, Resources):
            raise _refused(
                f"those of the group `{name}` are hg.Resources, got `{type(each).__name__}`",
                f'resources={{"{name}": hg.Resources(cpu=1)}}',
            )
    return dict(resources)


def sharing_groups(graph: Graph) -> dict[int, str]:
    """The slot sharing group of each node, by the node's id.

    A node without a group of its own is in that of its inputs, if they all have the same, and else in the
    default one. The end of a loop is in the group of its begin, with which it shares a slot.
    """
    groups: dict[int, str] = {}
    for node in graph.nodes:
        before = {groups[input_.node.id] for input_ in node.inputs}
        if node.feeds is not None:
            groups[node.id] = groups[node.feeds]
        else:
            inherited = before.pop() if len(before) == 1 else DEFAULT_GROUP
            groups[node.id] = node.slot_sharing_group or inherited
    return groups
