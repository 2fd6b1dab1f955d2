"""The automaton of a pattern: from each state, the options for the next record.

A run is a partial match. Directly after taking a record it is in a *fresh* state, with all options
for what may come next. With the next record each option proceeds on its own: it takes the record,
or waits in a state that has this one option, or is given up. So a run never has to remember several
ways, and the ways do not affect each other.

A pattern is compiled stage by stage from the front, making states on first use. The continuations after a
record are a list of options. An optional stage contributes its own way and all ways after it; a repeated
one another round and, if it took enough, all ways after it. Stages that must not come are no states: they
are written into the options that they forbid.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, Final, Literal, TypeAlias

from ...errors import PlanError
from .conditions import ALWAYS, Condition, Leaf
from .pattern import Pattern, Stage, all_stages

OptionKind: TypeAlias = Literal["strict", "relaxed", "any", "end", "absent"]
"""The contiguity of an option. `end`: no record, but the end of the pattern's time. `absent`: the
match completes with any next record, which does not belong to it."""
START: Final = 0
"""The state of a run that has taken no record."""


@dataclass(frozen=True, slots=True)
class AutomatonTransition:
    """One way to proceed.

    Attributes:
        kind: how near the record must be.
        stage: the index of the stage that takes it; -1 if none does.
        take: the condition of records that it takes.
        stop: the end of a repetition: records that meet it are not taken after all.
        unless: a record that meets one of these ends this way.
        unless_first: the same, only for the record directly after the one taken before.
        target: the state after the record.
        wait: the state in which this way waits; -1 if it does not.
        window_ms: it takes a record only less than this after the one taken before; None: no limit.
    """

    kind: OptionKind
    stage: int
    take: Condition
    stop: Leaf | None
    unless: tuple[Condition, ...]
    unless_first: tuple[Condition, ...]
    target: int
    wait: int
    window_ms: int | None = None


@dataclass(frozen=True, slots=True)
class AutomatonState:
    """A state of a run.

    Attributes:
        options: what may come next.
        fresh: the run has just taken a record.
        final: a record that leads here completes a match.
        pending: the match completes when its time ends.
        told: the records of a run here are, or become, a match in any case, so it is not reported
            as timed out.
    """

    options: tuple[AutomatonTransition, ...]
    fresh: bool
    final: bool
    pending: bool
    told: bool

    @property
    def window_ms(self) -> int | None:
        """The age of the last record at which all options expire; None if one has no such limit."""
        windows = [option.window_ms for option in self.options]
        limits = [window for window in windows if window is not None]
        return max(limits) if limits and len(limits) == len(windows) else None


@dataclass(frozen=True)
class Automaton:
    """The states of a pattern, and the names of the stages that take records. Picklable."""

    states: tuple[AutomatonState, ...]
    stages: tuple[str, ...]

    @property
    def leaves(self) -> list[Leaf]:
        """Return all conditions, each once, in the order of the states."""
        found: dict[Leaf, None] = {}
        for state in self.states:
            for option in state.options:
                conditions = (option.take, *option.unless, *option.unless_first)
                found.update((leaf, None) for c in conditions for _, leaf in c.terms)
                if option.stop is not None:
                    found[option.stop] = None
        return list(found)

    def shape(self) -> str:
        """Return the structure as text: equal for patterns that can continue each other's runs."""
        numbers = {leaf: str(number) for number, leaf in enumerate(self.leaves)}
        parts = [",".join(self.stages), "".join(leaf.kind[:2] for leaf in self.leaves)]

        def text(condition: Condition) -> str:
            return "".join(
                ("|" if by_or else "&") + numbers[leaf] for by_or, leaf in condition.terms
            )

        for state in self.states:
            flags = f"{state.fresh:d}{state.final:d}{state.pending:d}"
            options = [
                f"{o.kind}:{o.stage}:{text(o.take)}:{'' if o.stop is None else numbers[o.stop]}:"
                f"{[text(c) for c in o.unless]}:{[text(c) for c in o.unless_first]}:{o.target}:{o.wait}"
                for o in state.options
            ]
            parts.append(f"{flags}({';'.join(options)})")
        return "/".join(parts)


@dataclass(frozen=True, eq=False)
class _Way:
    """An option whose states have no numbers yet; `begins`: it begins the pattern or group it is in."""

    kind: OptionKind
    begins: bool
    stage: int
    take: Condition
    stop: Leaf | None
    unless: tuple[Condition, ...]
    unless_first: tuple[Condition, ...]
    target: _Point | None
    window_ms: int | None = None

    def also_unless(self, conditions: Sequence[Condition]) -> _Way:
        return replace(self, unless=(*self.unless, *conditions)) if conditions else self

    def within(self, window_ms: int | None) -> _Way:
        if window_ms is None:
            return self
        return replace(self, window_ms=min(window_ms, self.window_ms or window_ms))


@dataclass(frozen=True, eq=False)
class _Next:
    """The possible continuations; `final`: the match may also be complete.

    `final_unless` applies only where something must not come meanwhile, so that the match does not
    complete at once.
    """

    ways: tuple[_Way, ...]
    final: bool
    final_unless: tuple[Condition, ...] = ()


class _Point:
    """A fresh state: the continuations after a record that was taken."""

    def __init__(self, make: Callable[[], _Next]) -> None:
        self.make = make


class _Sequence:
    """Consecutive stages.

    `after` gives the continuations of the last one. `absences` are the stages directly after it
    that must not come, where the stages are the body of a group.
    """

    def __init__(
        self,
        stages: tuple[Stage, ...],
        after: Callable[[], _Next],
        numbers: dict[str, int],
        absences: Sequence[Stage] = (),
    ) -> None:
        self._stages = stages
        self._absences = absences
        self._after = after
        self._numbers = numbers
        self._known: dict[int, _Next] = {}

    def at(self, index: int) -> _Next:
        """Return the continuations once the stages before `index` are done."""
        if index not in self._known:
            self._known[index] = self._made(index)
        return self._known[index]

    def _made(self, index: int) -> _Next:
        if index == len(self._stages):
            return self._after()
        stage = self._stages[index]
        if stage.negated:
            return self._behind_absence(stage, self.at(index + 1))
        loop = _Loop(stage, lambda: self._exits(index), self._absences_behind(index), self._numbers)
        first = loop.round(1)
        if not stage.optional:
            return first
        exits = self._exits(index)
        return replace(exits, ways=(*first.ways, *exits.ways))

    def _exits(self, index: int) -> _Next:
        """Return the continuations once the stage has enough; after a greedy one none that it would
        take itself."""
        stage, behind = self._stages[index], self.at(index + 1)
        if not stage.greedy or stage.low == stage.high:
            return behind
        guard = (stage.condition,)
        ways = tuple(way.also_unless(guard) for way in behind.ways)
        return _Next(ways, behind.final, (*behind.final_unless, *guard))

    def _absences_behind(self, index: int) -> list[Stage]:
        """Return the stages directly after this one that must not come."""
        behind = self._stages[index + 1 :]
        found = list(takewhile(lambda stage: stage.negated, behind))
        return [*found, *self._absences] if len(found) == len(behind) else found

    @staticmethod
    def _behind_absence(stage: Stage, behind: _Next) -> _Next:
        forbidden = (stage.condition,)
        if stage.how == "strict":
            ways = [replace(w, unless_first=(*w.unless_first, *forbidden)) for w in behind.ways]
            if behind.final:
                ways.append(
                    _Way("absent", False, -1, ALWAYS, None, behind.final_unless, forbidden, None)
                )
        else:
            ways = [way.also_unless(forbidden) for way in behind.ways]
            if behind.final:
                unless = (*behind.final_unless, *forbidden)
                ways.append(_Way("end", False, -1, ALWAYS, None, unless, (), None))
        return _Next(tuple(ways), False)


class _Loop:
    """The rounds of one stage: each takes a record, or passes through the body of a group."""

    def __init__(
        self,
        stage: Stage,
        exits: Callable[[], _Next],
        absences: list[Stage],
        numbers: dict[str, int],
    ) -> None:
        self._stage = stage
        self._exits = exits
        self._absences = absences
        self._numbers = numbers
        self._points: dict[int, _Point] = {}
        self._bodies: dict[int, _Sequence] = {}

    def round(self, number: int) -> _Next:
        """Return the ways to begin a round; rounds above `low` of an unbounded stage are the same."""
        stage = self._stage
        how = stage.how if number == 1 else stage.inner or "relaxed"
        actual = number if stage.high is not None else min(number, stage.low)
        begun = self._begun(actual, how)
        if number == 1:
            return begun
        until = [] if stage.until is None else [Condition(((False, stage.until),))]
        against = [*until, *self._forbidden(number)]
        ways = (way.also_unless(against).within(stage.window_ms) for way in begun.ways)
        return _Next(tuple(ways), begun.final)

    def _forbidden(self, number: int) -> list[Condition]:
        """Return what ends the stage instead of round `number`, above 1: what must not come after it.

        What must not come next ends it only once the stage has enough: before that, nothing comes
        next.
        """
        absences = self._absences if number > self._stage.low else self._not_at_all
        return [stage.condition for stage in absences]

    @property
    def _not_at_all(self) -> list[Stage]:
        """Return what must not come after the stage at all, without what only must not come next."""
        return [stage for stage in self._absences if stage.how != "strict"]

    def _begun(self, number: int, how: str) -> _Next:
        stage = self._stage
        begins = how == "begin"
        kind: Any = "strict" if begins else how
        if stage.body is None:
            stage_number, point = self._numbers[stage.name], self._point(number)
            way = _Way(kind, begins, stage_number, stage.condition, stage.until, (), (), point)
            return _Next((way,), False)
        if number not in self._bodies:
            behind = self._absences if number >= stage.low else self._not_at_all
            self._bodies[number] = _Sequence(
                stage.body, lambda: self._after(number), self._numbers, behind
            )
        inside = self._bodies[number].at(0)
        ways = [replace(w, kind=kind, begins=begins) if w.begins else w for w in inside.ways]
        return _Next(tuple(ways), inside.final)

    def _point(self, number: int) -> _Point:
        if number not in self._points:
            self._points[number] = _Point(lambda: self._after(number))
        return self._points[number]

    def _after(self, number: int) -> _Next:
        """Return the continuations after a round."""
        stage = self._stage
        again: tuple[_Way, ...] = ()
        if stage.high is None or number < stage.high:
            again = self.round(number + 1).ways
        if number < stage.low:
            return _Next(again, False)
        exits = self._exits()
        return replace(exits, ways=(*again, *exits.ways))


def compiled(pattern: Pattern[Any]) -> Automaton:
    """Compile a pattern.

    Raises:
        PlanError: it ends with what must not follow, without a time limit.
    """
    names = [stage.name for stage in pattern.taking]
    numbers = {name: number for number, name in enumerate(names)}
    sequence = _Sequence(pattern.stages, lambda: _Next((), True), numbers)
    automaton = Automaton(_Numbering(sequence.at(0)).states(), tuple(names))
    if pattern.within_ms is None and pattern.gap_ms is None:
        _check_ends(pattern, automaton)
    return automaton


def _check_ends(pattern: Pattern[Any], automaton: Automaton) -> None:
    if any(state.pending for state in automaton.states):
        stage = [stage for stage in all_stages(pattern.stages) if stage.negated][-1]
        raise PlanError(
            f"the pattern ends with not_followed_by `{stage.name}`, without a time limit",
            where=str(stage.origin),
            fix='add .within("10m"): the match completes when this time has passed',
        )


class _Numbering:
    """Numbers states: those after records in the order they are reached, then those that wait."""

    def __init__(self, start: _Next) -> None:
        self._points: dict[_Point, int] = {_Point(lambda: start): 0}
        self._nexts: list[_Next] = []
        self._waits: dict[tuple[_Way, bool], int] = {}

    def states(self) -> tuple[AutomatonState, ...]:
        """Return all states."""
        todo = list(self._points)
        while todo:
            found = todo.pop(0).make()
            self._nexts.append(found)
            for way in found.ways:
                if way.target is not None and way.target not in self._points:
                    self._points[way.target] = len(self._points)
                    todo.append(way.target)
        for found in self._nexts[1:]:
            for way in found.ways:
                if way.kind in ("relaxed", "any", "end"):
                    key = (way, _told(found))
                    self._waits.setdefault(key, len(self._points) + len(self._waits))
        fresh = [self._fresh(number, found) for number, found in enumerate(self._nexts)]
        waiting = [
            AutomatonState((self._option(way, told),), False, False, way.kind == "end", told)
            for way, told in self._waits
        ]
        return (*fresh, *waiting)

    def _fresh(self, number: int, found: _Next) -> AutomatonState:
        told = _told(found)
        options = tuple(self._option(way, told) for way in found.ways)
        pending = any(way.kind == "end" for way in found.ways)
        return AutomatonState(options, True, found.final and number > 0, pending, told)

    def _option(self, way: _Way, told: bool) -> AutomatonTransition:
        target = -1 if way.target is None else self._points[way.target]
        wait = self._waits.get((way, told), -1)
        return AutomatonTransition(
            way.kind,
            way.stage,
            way.take,
            way.stop,
            way.unless,
            way.unless_first,
            target,
            wait,
            way.window_ms,
        )


def _told(found: _Next) -> bool:
    return found.final or any(way.kind == "end" for way in found.ways)
