"""The field `window` of an operator: its kind and its arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from ...errors import PlanError
from ...operators.durations import parse_duration
from ...operators.windows.kinds import count_window, cumulative, global_window, sliding, tumbling
from ...operators.windows.records.assigners import WindowAssigner
from ...operators.windows.sessions.window import session
from ..stream import Stream
from .fields import AnyText, ChoiceKind, Field, Section, Table, TextKind, duration
from .references import is_reference, resolve_function
from .step import (
    INSTANCE,
    ROWS,
    StepBuilder,
    given,
    instance,
    instance_of,
    readable,
    reference_of,
    sound,
    timed,
)

WINDOW = Section(
    "window",
    {
        "tumbling": Field(duration(), "consecutive windows of this length"),
        "sliding": Field(duration(), "windows of this length, one starting at each `every`"),
        "cumulative": Field(duration(), "windows that grow by `step` up to this length"),
        "session": Field(
            TextKind(meaning="a duration with a unit such as `30m`, SQL, or `module:function`"),
            "windows that end after this gap; also SQL, or `module:function` of a record",
        ),
        "count": Field(ROWS, "windows of the last N records of a key, at every `every` records"),
        "global": Field(ChoiceKind(("all",)), "`all`: one window for all records of a key"),
        "python": Field(INSTANCE, "a `module:WindowAssigner` of your own"),
        "every": Field(AnyText(), "of `sliding` a duration, of `count` a number of records"),
        "step": Field(duration(), "of `cumulative`"),
        "offset": Field(duration(), "shifts their bounds"),
        "allowedLateness": Field(duration(), "how long a closed window still takes records"),
        "zone": Field(TextKind(), "windows of whole days begin at midnight in this time zone"),
        "emitEvery": Field(duration(), "emit early results at this processing-time interval"),
        "emitRows": Field(ROWS, "emit early results after this many rows of a subtask"),
        "time": Field(ChoiceKind(("event", "processing")), "`processing`: by the machine's clock"),
        "trigger": Field(INSTANCE, "a `module:Trigger`: when windows fire"),
        "evictor": Field(INSTANCE, "a `module:Evictor`: which records are left out"),
    },
)
WINDOWED = {"window": Field(WINDOW, "the windows of the records")}
_EARLY: Final = {"emit_every": "emitEvery", "emit_rows": "emitRows"}
_PANES: Final = {
    "offset": "offset",
    "allowed_lateness": "allowedLateness",
    "zone": "zone",
    **_EARLY,
}
_TAKES: Final[dict[str, dict[str, str]]] = {
    "tumbling": {**_PANES, "time": "time"},
    "sliding": {**_PANES, "every": "every", "time": "time"},
    "cumulative": {**_PANES, "step": "step"},
    "session": {"allowed_lateness": "allowedLateness", "time": "time"},
    "count": {"every": "every"},
    "global": _EARLY,
    "python": {},
}
"""The arguments of each kind's function, with their fields."""
_REQUIRED: Final = {"sliding": "every", "cumulative": "step"}
_ALL: Final = {"trigger", "evictor"}
"""Arguments that every kind accepts."""
_UNTIMED: Final = ("count", "global", "python")
"""Kinds that need no event time, or whose instance decides."""


class WindowSpec:
    """The field `window`, checked on its own.

    Attributes:
        window: for `.window(...)`; None if something is wrong.
        options: a trigger and an evictor, by argument.
        of_records: the field that makes it a record-at-a-time window; empty if none does.
    """

    def __init__(self, name: str, table: Table, builder: StepBuilder) -> None:
        self._builder = builder
        self._line = table.line_of("window")
        self._needs_time = False
        self.window: Any = None
        self.options: dict[str, Any] = {}
        self.of_records = ""
        section = table.get("window")
        if section is None:
            return
        kind = _kind(section, name, builder)
        if kind is None:
            return
        for option in sorted(_ALL):
            if (made := instance_of(section, option, builder)) is not None:
                self.options[option] = made
        self._needs_time = kind not in _UNTIMED and section.get("time") != "processing"
        by_clock = kind == "session" and section.get("time") == "processing"
        own = "python" if kind == "python" else ""
        self.of_records = own or "time" * by_clock or next(iter(self.options), "")
        fits = _check_fields(kind, section, builder)
        if fits and not section.bad and sound(section, **(dict.fromkeys(_ALL) | self.options)):
            self.window = _window(kind, section, builder)

    def of(self, groups: Any, stream: Stream[Any]) -> Any:
        """Return `groups`, which are those of `stream`, in windows; None if that is refused."""
        if self._needs_time and not timed(stream, "a window", self._line, self._builder):
            return None
        if self.window is None or groups is None:
            return None
        return self._builder.attempt(self._line, lambda: groups.window(self.window, **self.options))


def _kind(section: Table, name: str, builder: StepBuilder) -> str | None:
    tried = section.present(list(_TAKES))
    if len(tried) > 1:
        builder.problems.add(
            section.line_of(tried[1]),
            f"window has more than one kind operator=`{name}`: {', '.join(tried)}",
            "keep one",
        )
    elif not tried and not section.strange:
        builder.problems.add(
            section.line,
            f"window has no kind operator=`{name}`",
            f"use one of {', '.join(_TAKES)}",
        )
    return tried[0] if len(tried) == 1 else None


def _check_fields(kind: str, section: Table, builder: StepBuilder) -> bool:
    before = len(builder.problems.found)
    takes = {kind, *_TAKES[kind].values(), *_ALL}
    for field in section.lines:
        if field not in takes and section.tried(field):
            builder.problems.add(
                section.line_of(field),
                f"{field} has no effect for a {kind} window",
                f"remove it; {kind} takes {', '.join(sorted(takes - {kind}))}",
            )
    _check_every(kind, section, builder)
    required = _REQUIRED.get(kind)
    if required is not None and not section.tried(required):
        builder.problems.add(
            section.line, f"a {kind} window has no {required}", f"{required}: a duration"
        )
    return len(builder.problems.found) == before


def _check_every(kind: str, section: Table, builder: StepBuilder) -> None:
    """Check that `every` is a duration or a number, as the kind of window needs."""
    every, line = section.get("every"), section.line_of("every")
    if every is None:
        return
    if kind == "sliding":
        builder.attempt(line, lambda: parse_duration(every, "every"))
    elif kind == "count" and not every.isdecimal():
        builder.problems.add(
            line,
            f"every of a count window must be a number of records, not the text `{every}`",
            "such as every: 10",
        )


def _window(kind: str, section: Table, builder: StepBuilder) -> Any:
    line, value = section.line_of(kind), section.get(kind)
    if isinstance(value, Table) and not readable(value):
        return None
    arguments = given(section, **_TAKES[kind])
    make = _MAKERS[kind]
    return builder.attempt(line, lambda: make(value, **arguments))


def _session(gap: str, **arguments: Any) -> Any:
    return session(resolve_function(gap) if is_reference(gap) else gap, **arguments)


def _count(size: int, every: str | None = None) -> Any:
    return count_window(size, None if every is None else int(every))


def _global(_: str, **arguments: Any) -> Any:
    return global_window(**arguments)


def _assigner(said: Any) -> Any:
    found = instance(said)
    if not isinstance(found, WindowAssigner):
        raise PlanError(
            f"not a window assigner reference=`{reference_of(said)}` type=`{type(found).__name__}`",
            fix="derive a class from hg.WindowAssigner",
        )
    return found


_MAKERS: Final[dict[str, Callable[..., Any]]] = {
    "tumbling": tumbling,
    "sliding": sliding,
    "cumulative": cumulative,
    "session": _session,
    "count": _count,
    "global": _global,
    "python": _assigner,
}
