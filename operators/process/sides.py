"""Side outputs: further typed outputs of a process function."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from ...errors import PlanError

T = TypeVar("T")


class SideOutput(Generic[T]):
    """A further output of a process function, declared in the body of its class.

        class Guard(hg.KeyedProcess[str, Payment, Alert]):
            ignored = hg.SideOutput[Payment]()

    `ctx.emit(self.ignored, record)` sends a record there, `stream.side(Guard.ignored)` is the stream of
    those records, which can be used any number of times. They are Python objects; `map` with `into=`
    makes columns of them.
    """

    def __init__(self) -> None:
        self.name = ""
        self.owner = ""

    def __set_name__(self, owner: type[Any], name: str) -> None:
        self.name = name
        self.owner = owner.__name__

    def __repr__(self) -> str:
        return f"SideOutput({self.owner}.{self.name})"


def declared_sides(kind: type[Any]) -> dict[str, SideOutput[Any]]:
    """Return the side outputs of a class and its bases by name; a subclass hides those of its base.

    Raises:
        PlanError: one object is the side output of two names.
    """
    attributes: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        attributes.update(vars(base))
    found = {name: side for name, side in attributes.items() if isinstance(side, SideOutput)}
    for name, side in found.items():
        if side.name != name:
            raise PlanError(
                f"one SideOutput has two names: `{name}` and `{side.name}`",
                fix="write hg.SideOutput[...]() for each",
            )
    return found
