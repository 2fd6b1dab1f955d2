"""Makes steps of joins: checks what was given, with the user's line, and adds the node."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from ...errors import PlanError
from ..base import OperatorFactory
from ..graph import Node, Origin
from ..partitioning import HashColumns, HashFunction
from ..process.plan import check_connected
from ..suggestions import suggest
from .bounds import parse_interval, show_interval
from .columns import JoinColumns, join_columns
from .interval import IntervalJoin
from .step import HOWS, LATE_SIDES, How, JoinStep, outer_sides

if TYPE_CHECKING:
    from ..stream import Stream

Keyed: TypeAlias = "tuple[Stream[Any], HashColumns | HashFunction]"


def add_interval_join(
    left: Keyed,
    right: Keyed,
    within: object,
    how: How,
    name: str,
    suffix: str | None,
    origin: Origin,
) -> Stream[Any]:
    """The step of `keyed.join(other, within=...)`."""
    interval = parse_interval(within, origin)
    columns = checked_columns(left, right, how, HOWS, suffix, origin)
    step = JoinStep(name, columns, outer_sides(how))
    detail = f"{show_interval(interval)}, {how}"
    factory = partial(IntervalJoin, step, interval)
    return add_join(left, right, "interval_join", name, factory, columns, detail, origin)


def checked_columns(
    left: Keyed,
    right: Keyed,
    how: How,
    hows: tuple[str, ...],
    suffix: str | None,
    origin: Origin,
) -> JoinColumns:
    """The columns of a join of two keyed streams.

    Raises:
        PlanError: they cannot be joined.
    """
    if how not in hows:
        raise PlanError(f"unknown how `{how}`", where=str(origin), fix=suggest(how, hows, "how"))
    check_connected(left[0], right[0], origin)
    schemas = tuple(stream._columns("join", origin) for stream, _ in (left, right))
    keys = tuple(_key_columns(keyed_by, origin) for _, keyed_by in (left, right))
    if not left[0].has_event_time:
        raise PlanError(
            f"a join needs event time, and `{left[0].name}` has none",
            where=str(origin),
            fix='call .event_time("column", max_out_of_order="10s") on both streams before',
        )
    outer = outer_sides(how)
    nullable = (outer[1], outer[0])
    names = (left[0].name, right[0].name)
    return join_columns(
        (schemas[0], schemas[1]), (keys[0], keys[1]), nullable, suffix, names, origin
    )


def add_join(
    left: Keyed,
    right: Keyed,
    kind: str,
    name: str,
    factory: OperatorFactory,
    columns: JoinColumns,
    detail: str,
    origin: Origin,
) -> Stream[Any]:
    """Add the node of a join, and the side outputs of late rows."""
    streams = (left[0], right[0])
    node = Node(
        id=-1,
        name=name,
        kind=kind,
        origin=origin,
        inputs=tuple(stream._input(keyed_by) for stream, keyed_by in (left, right)),
        factory=factory,
        schema=columns.result,
        stateful=True,
        sides={tag: stream.schema for tag, stream in zip(LATE_SIDES, streams, strict=True)},
        detail=detail,
    )
    return left[0]._like(left[0]._job.add_node(node))


def _key_columns(keyed_by: HashColumns | HashFunction, origin: Origin) -> tuple[str, ...]:
    if isinstance(keyed_by, HashColumns):
        return keyed_by.columns
    raise PlanError(
        "a join needs keys made of columns, and key_with gives a function",
        where=str(origin),
        fix='make the key a column and name it: .select("*", "lower(url) AS key").key_by("key")',
    )
