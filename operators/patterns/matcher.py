"""Runs the automaton over the records of one key, in order, and reports matches and timed-out runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, NamedTuple

from ..functions.user_code import user_error, user_failures
from .automaton import START, Automaton, AutomatonTransition
from .buffer import NO_NODE, Event, NodeId, SharedBuffer
from .conditions import Condition, Leaf
from .match import AfterMatch, Earlier


class Run(NamedTuple):
    """A partial match.

    Attributes:
        state: its state in the automaton.
        node: the last record it took, in the shared buffer.
        first: the number of its first record.
        start: event time of its first record, ms.
        last: event time of its last record, ms.
    """

    state: int
    node: NodeId
    first: int
    start: int
    last: int


_BEGINNING: Final = Run(START, NO_NODE, -1, 0, 0)


@dataclass(slots=True)
class Runs:
    """The runs of one key.

    Attributes:
        number: of the next record.
        active: the runs, earlier beginnings first.
        complete: matches that wait, because a run that began earlier may still drop them.
        held: the number of shared-buffer nodes they refer to, for storage.
    """

    number: int = 0
    active: list[Run] = field(default_factory=list)
    complete: list[Run] = field(default_factory=list)
    held: int = 0

    @property
    def idle(self) -> bool:
        """True if there are no runs, so that nothing has to be stored."""
        return not self.active and not self.complete

    def plain(self) -> tuple[Any, ...]:
        """Return the runs as tuples, to be stored."""
        active, complete = ([tuple(r) for r in runs] for runs in (self.active, self.complete))
        return self.number, active, complete, self.held

    @classmethod
    def of_plain(cls, plain: tuple[Any, ...]) -> Runs:
        """Restore runs from the tuples of `plain`."""
        number, active, complete, held = plain
        return cls(number, [Run(*r) for r in active], [Run(*r) for r in complete], held)


@dataclass(frozen=True)
class Rules:
    """The rules of a pattern. Picklable.

    Attributes:
        automaton: its states.
        after: which overlapping matches are dropped.
        within_ms: from the first to the last record, less than this; None: no limit.
        gap_ms: from each record to the next, less than this; None: no limit.
        bits: the number of each expression among the answers for a record.
        step: the name of the step, for errors.
    """

    automaton: Automaton
    after: AfterMatch
    within_ms: int | None
    gap_ms: int | None
    bits: Mapping[Leaf, int]
    step: str

    def deadline(self, run: Run) -> int | None:
        """Return when the time of a run ends, ms; None: never."""
        within = None if self.within_ms is None else run.start + self.within_ms
        gaps = (self.gap_ms, self.windows[run.state])
        gap = min((gap for gap in gaps if gap is not None), default=None)
        if gap is None:
            return within
        return run.last + gap if within is None else min(run.last + gap, within)

    @cached_property
    def windows(self) -> list[int | None]:
        """Return, by state, how long after the last record taken a run expires; None: no such limit."""
        return [state.window_ms for state in self.automaton.states]

    @cached_property
    def in_order(self) -> bool:
        """True if runs expire in the order in which they began."""
        return self.gap_ms is None and not any(self.windows)


class _Judge:
    """Evaluates conditions for one record; conditions of the record alone are evaluated once."""

    def __init__(
        self, rules: Rules, event: Event, load: Callable[[NodeId], dict[str, list[Any]]]
    ) -> None:
        self._rules = rules
        self._event = event
        self._load = load
        self._known: dict[Leaf, bool] = {}
        self._earlier: dict[NodeId, Earlier[Any]] = {}
        self.node: NodeId = NO_NODE
        """The taken records of the current run."""

    def __call__(self, leaf: Leaf) -> bool:
        if leaf.kind == "expression":
            return bool(self._event.answers >> self._rules.bits[leaf] & 1)
        if leaf.kind == "earlier":
            return self._asked(leaf, self._event.record, self._earlier_of(self.node))
        known = self._known.get(leaf)
        if known is None:
            known = self._known[leaf] = self._asked(leaf, self._event.record)
        return known

    def any(self, conditions: Iterable[Condition]) -> bool:
        return any(condition.holds(self) for condition in conditions)

    def _asked(self, leaf: Leaf, *arguments: Any) -> bool:
        assert callable(leaf.given)
        try:
            return bool(leaf.given(*arguments))
        except user_failures() as error:
            raise user_error(self._rules.step, leaf.origin, arguments[0], error) from error

    def _earlier_of(self, node: NodeId) -> Earlier[Any]:
        earlier = self._earlier.get(node)
        if earlier is None:
            earlier = Earlier(lambda: self._load(node), self._event.time)
            self._earlier[node] = earlier
        return earlier


class Matcher:
    """Matches one key at a time: set `runs`, and switch the buffer to this key.

    Args:
        rules: the pattern.
        buffer: the records that were taken.
    """

    def __init__(self, rules: Rules, buffer: SharedBuffer) -> None:
        self._rules = rules
        self._states = rules.automaton.states
        self._buffer = buffer
        self.runs = Runs()

    def on_record(self, time: int, record: Any, answers: int) -> list[NodeId]:
        """Handle the next record of the key, after everything that is due at its time.

        Return the matches that are final now, each as its last node, which the caller must release.
        """
        runs = self.runs
        event = Event(runs.number, time, record, answers)
        runs.number += 1
        judge = _Judge(self._rules, event, self.taken)
        before, runs.active = runs.active, []
        for run in before:
            self._step(run, event, judge)
        self._step(_BEGINNING, event, judge)
        for run in before:
            self._buffer.release(run.node)
        return self._certain()

    @property
    def size(self) -> int:
        """The measure of partial matches: the number of runs, or of records that they have taken.

        A record taken by runs of different beginnings counts once for each.
        """
        return max(len(self.runs.active) + len(self.runs.complete), self._buffer.held)

    def next_deadline(self) -> int | None:
        """Return when the time of the next run ends, ms; None: never."""
        rules, active = self._rules, self.runs.active
        if rules.in_order:
            return rules.deadline(active[0]) if active else None
        deadlines = [rules.deadline(run) for run in active]
        return min((at for at in deadlines if at is not None), default=None)

    def on_deadline(self, time: int) -> tuple[list[NodeId], list[NodeId]]:
        """End the runs whose time is over at `time` (ms).

        Return the matches that are final now, and the timed-out ones; the caller must release both.
        """
        runs, rules = self.runs, self._rules
        over: list[Run] = []
        active: list[Run] = []
        for run in runs.active:
            at = rules.deadline(run)
            (active if at is None or at > time else over).append(run)
        runs.active = active
        going_on = {run.node for run in active}
        timed_out: dict[NodeId, None] = {}
        for run in over:
            if self._states[run.state].pending:
                self._complete(run)
            elif not (self._states[run.state].told or run.node in going_on):
                timed_out[run.node] = None
        for node in timed_out:
            self._buffer.need(node)
        for run in over:
            self._buffer.release(run.node)
        return self._certain(), list(timed_out)

    def on_end(self) -> list[NodeId]:
        """Give up all runs at the end of the input, so that nothing can drop complete matches.

        Return the matches that are final now; the caller must release them.
        """
        for run in self.runs.active:
            self._buffer.release(run.node)
        self.runs.active = []
        return self._certain()

    def taken(self, node: NodeId) -> dict[str, list[Any]]:
        """Return the records up to a node, by stage."""
        stages = self._rules.automaton.stages
        records: dict[str, list[Any]] = {stage: [] for stage in stages}
        for stage, number in self._buffer.path(node):
            records[stages[stage]].append(self._buffer.event(number).record)
        return records

    def span(self, node: NodeId) -> tuple[int, int]:
        """Return event time of the first and of the last record up to a node, ms."""
        path = self._buffer.path(node)
        return self._buffer.event(path[0][1]).time, self._buffer.event(path[-1][1]).time

    # --- one record ----------------------------------------------------------------------------

    def _step(self, run: Run, event: Event, judge: _Judge) -> None:
        state = self._states[run.state]
        judge.node = run.node
        for option in state.options:
            if option.window_ms is not None and event.time >= run.last + option.window_ms:
                continue
            if option.unless and judge.any(option.unless):
                continue
            if state.fresh and option.unless_first and judge.any(option.unless_first):
                continue
            if option.kind == "absent":
                self._complete(run)
            elif self._goes_on(run, option, event, judge) and option.wait >= 0:
                self._buffer.need(run.node)
                self.runs.active.append(run._replace(state=option.wait))

    def _goes_on(self, run: Run, option: AutomatonTransition, event: Event, judge: _Judge) -> bool:
        """Let an option take the record, if it does; return True if it also waits for others."""
        if option.kind == "end":
            return True
        takes = option.take.holds(judge)
        if takes and (option.stop is None or not judge(option.stop)):
            self._take(run, option, event)
        return run is not _BEGINNING and (
            option.kind == "any" or (option.kind == "relaxed" and not takes)
        )

    def _take(self, run: Run, option: AutomatonTransition, event: Event) -> None:
        node = self._buffer.take(option.stage, event, run.node)
        first, start = run.first, run.start
        if run is _BEGINNING:
            first, start = event.number, event.time
        taken = Run(option.target, node, first, start, event.time)
        state = self._states[option.target]
        if state.final:
            self._complete(taken)
        if state.options:
            self._buffer.need(node)
            self.runs.active.append(taken)

    # --- matches -------------------------------------------------------------------------------

    def _complete(self, run: Run) -> None:
        self._buffer.need(run.node)
        self.runs.complete.append(run)

    def _certain(self) -> list[NodeId]:
        """Return the matches that can no longer be dropped, in the order in which they begin."""
        runs, after = self.runs, self._rules.after
        if not runs.complete:
            return []
        if after.kind == "none":
            found, runs.complete = [run.node for run in runs.complete], []
            return found
        runs.complete.sort(key=lambda run: run.first)
        certain = []
        while runs.complete and not (runs.active and runs.active[0].first < runs.complete[0].first):
            match = runs.complete.pop(0)
            certain.append(match.node)
            keep = after.first_to_keep(self._numbers(match.node))
            if keep is not None:
                runs.active = self._pruned(runs.active, keep)
                runs.complete = self._pruned(runs.complete, keep)
        return certain

    def _numbers(self, node: NodeId) -> dict[str, list[int]]:
        stages = self._rules.automaton.stages
        numbers: dict[str, list[int]] = {}
        for stage, number in self._buffer.path(node):
            numbers.setdefault(stages[stage], []).append(number)
        return numbers

    def _pruned(self, several: list[Run], keep: int) -> list[Run]:
        """Return those that begin with record number `keep` or a later one."""
        kept = []
        for run in several:
            if run.first >= keep:
                kept.append(run)
            else:
                self._buffer.release(run.node)
        return kept
