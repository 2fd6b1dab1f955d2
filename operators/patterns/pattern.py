"""The builder of patterns. A pattern is immutable: every method returns a new one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, Literal, NoReturn, TypeAlias, TypeVar, overload

from ...errors import PlanError, UsageError
from ..durations import Duration, format_duration, parse_duration
from ..lazy_modules import pl
from ..origin import Origin, capture_origin
from .conditions import ALWAYS, Condition, ConditionLike, Leaf, leaf_of
from .match import AfterMatch, Earlier

T = TypeVar("T")

How: TypeAlias = Literal["begin", "strict", "relaxed", "any"]
"""The contiguity of a record with the one taken before it: see `Pattern.next` and its siblings."""
OneRecord: TypeAlias = "Callable[[T], object] | str | pl.Expr"
WithEarlier: TypeAlias = Callable[[T, Earlier[T]], object]
TIMES_MAX: Final = 10_000
"""The most counted repetitions of one stage, as each is a state of the automaton."""
_VERBS: Final = {"strict": "next", "relaxed": "followed_by", "any": "followed_by_any"}
_NOT_VERBS: Final = {"strict": "not_next", "relaxed": "not_followed_by"}


@dataclass(frozen=True, eq=False)
class Stage:
    """One step of a pattern.

    Attributes:
        name: of the stage; empty for groups.
        how: how near its first record must be to the record taken before.
        origin: the user's line.
        negated: such a record must not come.
        condition: the condition of its records.
        low, high: the number of records; `high` None: any number.
        optional: it may also take none.
        greedy: it takes as many as come.
        repeated: it has a quantifier.
        inner: how near its further records must be; None: not given, relaxed.
        until: the condition of a record that ends the repetition.
        window_ms: each further record comes less than this after the one before it; None: no limit.
        body: for a group: the pattern that takes the place of single records.
    """

    name: str
    how: How
    origin: Origin
    negated: bool = False
    condition: Condition = ALWAYS
    low: int = 1
    high: int | None = 1
    optional: bool = False
    greedy: bool = False
    repeated: bool = False
    inner: How | None = None
    until: Leaf | None = None
    window_ms: int | None = None
    body: tuple[Stage, ...] | None = None

    @property
    def loops(self) -> bool:
        """True if it can take more than one record (or body)."""
        return self.high != 1

    def describe(self) -> str:
        """Describe the stage for `explain`."""
        if self.body is not None:
            text = f"({describe(self.body)})"
        else:
            text = self.name
        if self.loops:
            high = "" if self.high is None else self.high
            text += f"{{{self.low},{high}}}" if self.low != self.high else f"{{{self.low}}}"
            if self.window_ms is not None:
                text += f" gaps below {format_duration(self.window_ms)}"
        text += "?" if self.optional else ""
        verbs = _NOT_VERBS if self.negated else _VERBS
        return text if self.how == "begin" else f"{verbs[self.how]} {text}"


def describe(stages: tuple[Stage, ...]) -> str:
    """Describe stages, such as `a next b{2,} followed_by c?`."""
    return " ".join(stage.describe() for stage in stages)


def all_stages(stages: tuple[Stage, ...]) -> list[Stage]:
    """Return the stages and those in groups, in order, without the groups themselves."""
    found: list[Stage] = []
    for stage in stages:
        found += [stage] if stage.body is None else all_stages(stage.body)
    return found


@dataclass(frozen=True, eq=False)
class Pattern(Generic[T]):
    """A pattern of records of one key, begun with `hg.cep.begin`. Methods apply to its last stage.

    Attributes:
        stages: its steps.
        after: which overlapping matches are dropped.
        within_ms: a match's last record comes less than this after its first; None: no limit.
        gap_ms: each record comes less than this after the one before it; None: no limit.
    """

    stages: tuple[Stage, ...]
    after: AfterMatch
    within_ms: int | None = None
    gap_ms: int | None = None

    def __repr__(self) -> str:
        return f"Pattern({self.describe()})"

    def describe(self) -> str:
        """Describe the pattern in one line, for `explain`."""
        text = describe(self.stages)
        if self.within_ms is not None:
            text += f" within {format_duration(self.within_ms)}"
        if self.gap_ms is not None:
            text += f" gaps below {format_duration(self.gap_ms)}"
        return text if self.after.kind == "none" else f"{text}, {self.after}"

    @property
    def taking(self) -> list[Stage]:
        """Return the stages that take records, those in groups included, in order."""
        return [stage for stage in all_stages(self.stages) if not stage.negated]

    # --- which records -------------------------------------------------------------------------

    @overload
    def where(self, condition: OneRecord[T]) -> Pattern[T]: ...
    @overload
    def where(self, condition: WithEarlier[T]) -> Pattern[T]: ...
    def where(self, condition: OneRecord[T] | WithEarlier[T]) -> Pattern[T]:
        """Take only records that meet a condition, and all given before. Without any, all records fit.

        Args:
            condition: a function of the record, or of the record and what the match has taken
                before it (`hg.cep.Earlier`), which must depend on nothing else; or an expression
                such as `"amount > 100"`, which is evaluated on whole batches.
        """
        return self._with_condition(condition, by_or=False)

    @overload
    def or_where(self, condition: OneRecord[T]) -> Pattern[T]: ...
    @overload
    def or_where(self, condition: WithEarlier[T]) -> Pattern[T]: ...
    def or_where(self, condition: OneRecord[T] | WithEarlier[T]) -> Pattern[T]:
        """Take also records that meet this condition instead of those given before it."""
        origin = capture_origin()
        if not self._last.condition.terms:
            _refuse("or_where needs a where before it", origin, "write where(...).or_where(...)")
        return self._with_condition(condition, by_or=True)

    @overload
    def until(self, condition: OneRecord[T]) -> Pattern[T]: ...
    @overload
    def until(self, condition: WithEarlier[T]) -> Pattern[T]: ...
    def until(self, condition: OneRecord[T] | WithEarlier[T]) -> Pattern[T]:
        """End the stage before the first record that meets this condition."""
        origin = capture_origin()
        last = self._atom("until", origin)
        if last.high is not None:
            _refuse(
                "until is for stages without an upper bound", origin, "call one_or_more before it"
            )
        if last.until is not None:
            _refuse("the stage has an until already", origin, "write one function for both")
        if last.greedy:
            _refuse_greedy_until(origin)
        return self._changed(until=leaf_of(condition, origin))

    # --- what follows --------------------------------------------------------------------------

    def next(self, stage: str | Pattern[T]) -> Pattern[T]:
        """Strict contiguity: directly after, with no other record of the key in between.

        Args:
            stage: the name of a new stage, or a pattern as a group, to which quantifiers then
                apply.
        """
        return self._then(stage, "strict", capture_origin())

    def followed_by(self, stage: str | Pattern[T]) -> Pattern[T]:
        """Relaxed contiguity: the next record that meets its condition; others in between do not matter."""
        return self._then(stage, "relaxed", capture_origin())

    def followed_by_any(self, stage: str | Pattern[T]) -> Pattern[T]:
        """Any later record that meets its condition, each in a match of its own."""
        return self._then(stage, "any", capture_origin())

    def not_next(self, stage: str) -> Pattern[T]:
        """The directly following record must not meet the condition of this stage."""
        return self._then_not(stage, "strict", capture_origin())

    def not_followed_by(self, stage: str) -> Pattern[T]:
        """No record up to that of the following stage may meet the condition of this stage.

        As the last stage: none until the time of `within` ends, when the match completes.
        """
        return self._then_not(stage, "relaxed", capture_origin())

    # --- how many ------------------------------------------------------------------------------

    def times(
        self, low: int, high: int | None = None, *, window: Duration | None = None
    ) -> Pattern[T]:
        """Take exactly `low` records, or from `low` to `high`.

        With `window`, such as `"10s"`, each of them but the first comes less than this after the
        one before it.
        """
        origin = capture_origin()
        high = low if high is None else high
        for number in (low, high):
            if isinstance(number, bool) or not isinstance(number, int):
                fix = 'a time limit is times(3, window="10s")'
                _refuse(f"times takes whole numbers value=`{number!r}`", origin, fix)
        if not (0 <= low <= high and high > 0):
            _refuse(f"times(low, high) needs 0 <= low <= high low=`{low}` high=`{high}`", origin)
        if high > TIMES_MAX:
            _refuse(f"times goes up to {TIMES_MAX} high=`{high}`", origin, "use one_or_more")
        if low == 0:
            return self._repeated(1, high, window, origin)._changed(optional=True)
        return self._repeated(low, high, window, origin)

    def one_or_more(self, *, window: Duration | None = None) -> Pattern[T]:
        """Take any number of records, at least one; `window` as for `times`."""
        return self._repeated(1, None, window, capture_origin())

    def times_or_more(self, low: int, *, window: Duration | None = None) -> Pattern[T]:
        """Take any number of records, at least `low`; `window` as for `times`."""
        origin = capture_origin()
        if isinstance(low, bool) or not isinstance(low, int) or not 1 <= low <= TIMES_MAX:
            _refuse(
                f"times_or_more takes a whole number from 1 to {TIMES_MAX} low=`{low!r}`", origin
            )
        return self._repeated(low, None, window, origin)

    def optional(self) -> Pattern[T]:
        """Make the stage optional."""
        origin = capture_origin()
        last = self._positive("optional", origin)
        if last.optional:
            _refuse(f"stage `{last.name}` is optional already", origin)
        return self._changed(optional=True)

    def greedy(self) -> Pattern[T]:
        """Take as many records as come: while more come, no following stage begins."""
        origin = capture_origin()
        last = self._atom("greedy", origin)
        if not last.loops:
            _refuse(
                "greedy is for stages that repeat", origin, "call one_or_more or times before it"
            )
        if last.until is not None:
            _refuse_greedy_until(origin)
        if last.inner == "any":
            _refuse_greedy_combinations(origin)
        return self._changed(greedy=True)

    def consecutive(self) -> Pattern[T]:
        """Require that the records of a repeated stage directly follow each other."""
        return self._with_inner("strict", "consecutive", capture_origin())

    def allow_combinations(self) -> Pattern[T]:
        """Allow a repeated stage to skip records that meet its condition: any combination of them."""
        return self._with_inner("any", "allow_combinations", capture_origin())

    # --- in which time -------------------------------------------------------------------------

    def within(
        self, duration: Duration, *, between: Literal["ends", "neighbours"] = "ends"
    ) -> Pattern[T]:
        """Limit the time of the whole match; the shortest limit counts if there are several.

        Args:
            duration: such as `"10m"`, in event time; a match takes less.
            between: `ends`: from the first record to the last. `neighbours`: from each record to
                the next.
        """
        origin = capture_origin()
        milliseconds = _span(duration, "within", origin)
        if between == "ends":
            return replace(self, within_ms=min(milliseconds, self.within_ms or milliseconds))
        if between != "neighbours":
            _refuse(f"between is ends or neighbours, not `{between}`", origin)
        return replace(self, gap_ms=min(milliseconds, self.gap_ms or milliseconds))

    # --- how it is made ------------------------------------------------------------------------

    @property
    def _last(self) -> Stage:
        return self.stages[-1]

    def _changed(self, **changes: Any) -> Pattern[T]:
        return replace(self, stages=(*self.stages[:-1], replace(self._last, **changes)))

    def _positive(self, method: str, origin: Origin) -> Stage:
        if self._last.negated:
            _refuse(
                f"{method} is not for a stage that must not come, as `{self._last.name}`", origin
            )
        return self._last

    def _atom(self, method: str, origin: Origin) -> Stage:
        last = self._positive(method, origin)
        if last.body is not None:
            _refuse(f"{method} is not for groups", origin, "call it on a stage of the group")
        return last

    def _with_condition(self, condition: ConditionLike, *, by_or: bool) -> Pattern[T]:
        origin = capture_origin()
        if self._last.body is not None:
            _refuse("a group has no condition of its own", origin, "give it to its stages")
        leaf = leaf_of(condition, origin)
        return self._changed(condition=self._last.condition.joined(leaf, by_or=by_or))

    def _repeated(
        self, low: int, high: int | None, window: Duration | None, origin: Origin
    ) -> Pattern[T]:
        last = self._positive("a quantifier", origin)
        if last.repeated:
            _refuse(f"stage `{last.name}` has a quantifier already", origin)
        window_ms = None if window is None else _span(window, "window", origin)
        if high == 1 and window_ms is not None:
            _refuse("window is the time between records of a stage, and it takes one only", origin)
        return self._changed(low=low, high=high, repeated=True, window_ms=window_ms)

    def _with_inner(self, inner: How, method: str, origin: Origin) -> Pattern[T]:
        last = self._positive(method, origin)
        if not last.loops:
            _refuse(
                f"{method} is for stages that repeat", origin, "call one_or_more or times before it"
            )
        if last.inner not in (None, inner):
            _refuse("a stage is either consecutive or allows combinations", origin)
        if inner == "any" and last.greedy:
            _refuse_greedy_combinations(origin)
        return self._changed(inner=inner)

    def _then(self, stage: str | Pattern[T], how: How, origin: Origin) -> Pattern[T]:
        if isinstance(stage, Pattern):
            return self._added(group_of(stage, how, origin), origin)
        return self._added(Stage(_checked_name(stage, origin), how, origin), origin)

    def _then_not(self, name: str, how: How, origin: Origin) -> Pattern[T]:
        if self._last.optional:
            _refuse(
                f"`{_NOT_VERBS[how]}` has no clear meaning after the optional stage `{self._last.name}`",
                origin,
                "write two patterns: one with that stage, one without",
            )
        return self._added(Stage(_checked_name(name, origin), how, origin, negated=True), origin)

    def _added(self, stage: Stage, origin: Origin) -> Pattern[T]:
        known = {found.name for found in all_stages(self.stages)}
        for new in all_stages((stage,)):
            if new.name in known:
                _refuse(
                    f"two stages have the name `{new.name}`", origin, "give them different names"
                )
        return replace(self, stages=(*self.stages, stage))


def begin(stage: str | Pattern[T], *, after_match: AfterMatch | None = None) -> Pattern[T]:
    """Begin a pattern with one stage, which takes any record; go on with its methods.

    Args:
        stage: the name of the first stage, or a pattern as a group.
        after_match: which overlapping matches are dropped, such as `hg.cep.skip_past_last_event()`;
            by default none.

    Raises:
        PlanError: not a name or pattern, or not a strategy.
    """
    origin = capture_origin()
    after = AfterMatch("none") if after_match is None else after_match
    if not isinstance(after, AfterMatch):
        _refuse(
            f"after_match is not a strategy type=`{type(after).__name__}`",
            origin,
            "such as after_match=hg.cep.skip_past_last_event()",
        )
    if isinstance(stage, Pattern):
        return Pattern((group_of(stage, "begin", origin),), after)
    return Pattern((Stage(_checked_name(stage, origin), "begin", origin),), after)


def group_of(pattern: Pattern[Any], how: How, origin: Origin) -> Stage:
    """Return a pattern as one stage of another.

    Raises:
        PlanError: it has what only a whole pattern can have, or all of it is optional.
    """
    if pattern.within_ms is not None or pattern.gap_ms is not None:
        _refuse("within applies to the whole pattern, not to a group", origin)
    if pattern.after.kind != "none":
        _refuse("after_match applies to the whole pattern, not to a group", origin)
    if all(stage.optional or stage.negated for stage in pattern.stages):
        _refuse("a group needs a stage that is not optional", origin)
    return Stage("", how, origin, body=pattern.stages)


def _checked_name(name: object, origin: Origin) -> str:
    if not isinstance(name, str) or not name:
        _refuse(f"a stage is a name or a pattern, not {name!r}", origin, 'such as .next("payment")')
    return name


def _span(duration: Duration, what: str, origin: Origin) -> int:
    try:
        milliseconds = parse_duration(duration, what, str(origin))
    except UsageError as error:
        raise PlanError(error.message, where=str(origin), fix=error.fix) from error
    if milliseconds < 1:
        _refuse(f"{what} needs at least 1 ms", origin)
    return milliseconds


def _refuse_greedy_until(origin: Origin) -> NoReturn:
    _refuse(
        "a stage is either greedy or has an until",
        origin,
        "until ends the stage anyway; make its condition part of where",
    )


def _refuse_greedy_combinations(origin: Origin) -> NoReturn:
    _refuse("a stage is either greedy or allows combinations", origin)


def _refuse(message: str, origin: Origin, fix: str = "") -> NoReturn:
    raise PlanError(message, where=str(origin), fix=fix)
