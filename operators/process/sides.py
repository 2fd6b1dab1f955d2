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
        if self.name:
            raise PlanError(
                f"one SideOutput has two names: `{self.owner}.{self.name}` and `{owner.__name__}.{name}`",
                fix="write hg.SideOutput[...]() for each",
            )
        self.name = name
        self.owner = owner.__name__

    def __repr__(self) -> str:
        return f"SideOutput({self.owner}.{self.name})"


def declared_sides(kind: type[Any]) -> dict[str, SideOutput[Any]]:
    """The side outputs of a class and its base classes by name; a subclass's attribute hides its base's."""
    attributes: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        attributes.update(vars(base))
    return {name: side for name, side in attributes.items() if isinstance(side, SideOutput)}
