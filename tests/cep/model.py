"""The meaning of a pattern in the plainest form: each way to write it out flat is tried on all records.

A pattern with quantifiers stands for all flat ones: some number of records of one stage, then of the next.
Of a flat one, each step says which record it wants and what must not come on the way to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import takewhile

from hypothesis import strategies as st

import headgate as hg

EVER = 2**62


@dataclass(frozen=True)
class Spec:
    """One stage: letters are the records that it wants."""

    name: str
    letters: str
    how: str = "strict"
    negated: bool = False
    low: int = 1
    high: int | None = 1
    optional: bool = False
    greedy: bool = False
    inner: str = "relaxed"
    until: str = ""
    window: int | None = None


@dataclass(frozen=True)
class Step:
    """One record of a flat pattern, or its end: `end` (of the time), `absent` (any record), `done`."""

    name: str = ""
    letters: str = ""
    how: str = "done"
    stop: str = ""
    never: str = ""
    never_first: str = ""
    window: int | None = None


@dataclass
class Model:
    """Finds all matches, and all that timed out, in the records of one key: (letter, time) in order."""

    specs: list[Spec]
    within: int | None
    gap: int | None
    records: list[tuple[str, int]]
    matches: dict[tuple, tuple] = field(default_factory=dict)
    """The records taken, as (stage, number of record), and the end of the match: (time, 0 or 1,
    number).
    """
    timed_out: dict[tuple, int] = field(default_factory=dict)
    known: dict[tuple[Step, ...], list[tuple]] = field(default_factory=dict)

    def run(self) -> Model:
        if not self.records:
            return self
        told: set[tuple] = set()
        waits: dict[tuple, set[tuple[int, int]]] = {}
        seen: set[tuple] = set()
        for flat in flats(self.specs, len(self.records)):
            for depth in range(len(flat)):
                step = flat[depth]
                if flat[: depth + 1] in seen:
                    continue
                seen.add(flat[: depth + 1])
                for taken in self.all_ways(flat[:depth]) if depth else ():
                    if step.how == "done":
                        self.matches[taken] = (*self.taken_at(taken), taken[-1][1])
                        told.add(taken)
                    elif step.how == "absent":
                        self.absent(taken, step)
                    if step.how == "end":
                        told.add(taken)
                        if self.alive(taken, step):
                            self.matches[taken] = (self.deadline(taken), 0, 0)
                    elif step.how != "done":
                        waits.setdefault(taken, set()).add(self.waits_until(taken, step))
        for taken, ends in waits.items():
            at, by_record = max(ends)
            if taken not in told and not by_record and at < EVER:
                self.timed_out[taken] = at
        return self

    def all_ways(self, steps: tuple[Step, ...]) -> list[tuple]:
        if steps not in self.known:
            self.known[steps] = list(self.ways(steps))
        return self.known[steps]

    def taken_at(self, taken: tuple) -> tuple[int, int]:
        return self.records[taken[-1][1]][1], 1

    def absent(self, taken: tuple, step: Step) -> None:
        number = taken[-1][1] + 1
        if number < len(self.records):
            letter, time = self.records[number]
            if self.in_time(taken, time) and letter not in step.never_first + step.never:
                self.matches[taken] = (time, 1, number)

    def ways(self, steps: tuple[Step, ...]) -> Iterator[tuple]:
        """All ways to take records for these steps."""
        if not steps:
            yield ()
            return
        step = steps[-1]
        for taken in self.all_ways(steps[:-1]):
            start = taken[-1][1] + 1 if taken else 0
            for number in range(start, len(self.records)):
                letter, time = self.records[number]
                if taken and time >= self.deadline(taken, step.window):
                    break
                if letter in step.never or (
                    number == start and taken and letter in step.never_first
                ):
                    if taken:
                        break
                    continue
                if letter in step.letters and letter not in step.stop:
                    yield (*taken, (step.name, number))
                if taken and self.ends(step, letter):
                    break

    @staticmethod
    def ends(step: Step, letter: str) -> bool:
        """Return True if a record ends the waiting for another."""
        return step.how == "strict" or (step.how == "relaxed" and letter in step.letters)

    def deadline(self, taken: tuple, window: int | None = None) -> int:
        last = self.records[taken[-1][1]][1]
        times = [last + span for span in (self.gap, window) if span is not None]
        if self.within is not None:
            times.append(self.records[taken[0][1]][1] + self.within)
        return min(times, default=EVER)

    def in_time(self, taken: tuple, time: int) -> bool:
        return time < self.deadline(taken)

    def alive(self, taken: tuple, step: Step) -> bool:
        """Return True if a way still waits for this step when its time is over."""
        return not self.waits_until(taken, step)[1]

    def waits_until(self, taken: tuple, step: Step) -> tuple[int, int]:
        """When a way no longer waits for this step, and 1 if that is because of a record, 0 of time."""
        start = taken[-1][1] + 1
        deadline = self.deadline(taken, step.window)
        for number in range(start, len(self.records)):
            letter, time = self.records[number]
            if time >= deadline:
                break
            if letter in step.never or (number == start and letter in step.never_first):
                return time, number + 1
            if step.how == "absent" or self.ends(step, letter):
                return time, number + 1
        return deadline, 0

    def kept(self, after: hg.cep.AfterMatch) -> list[tuple]:
        """The matches that a strategy leaves, in the order in which they begin."""
        order = sorted(self.matches, key=lambda taken: (taken[0][1], self.matches[taken]))
        kept, least = [], 0
        for taken in order:
            if taken[0][1] < least:
                continue
            kept.append(taken)
            numbers: dict[str, list[int]] = {}
            for name, number in taken:
                numbers.setdefault(name, []).append(number)
            least = max(least, kept_from(after, numbers))
        return kept


def kept_from(after: hg.cep.AfterMatch, numbers: dict[str, list[int]]) -> int:
    every = [n for several in numbers.values() for n in several]
    named = numbers.get(after.stage, [0])
    return {
        "none": 0,
        "next": min(every) + 1,
        "past_last": max(every) + 1,
        "first": named[0],
        "last": named[-1],
    }[after.kind]


def flats(specs: list[Spec], length: int) -> Iterator[tuple[Step, ...]]:
    """All flat patterns, cut off behind one step more than there are records."""
    yield from _flats(specs, 0, (), Step(how=""), length + 1)


def _flats(
    specs: list[Spec], index: int, before: tuple[Step, ...], bans: Step, length: int
) -> Iterator[tuple[Step, ...]]:
    """`bans`: what must not come on the way to the next step, whatever that is."""
    if len(before) > length:
        yield before
        return
    if index == len(specs):
        kind = bans.how or "done"
        yield (*before, replace(bans, how=kind))
        return
    spec = specs[index]
    if spec.negated:
        if spec.how == "strict":
            changed = replace(bans, never_first=bans.never_first + spec.letters, how="absent")
        else:
            changed = replace(bans, never=bans.never + spec.letters, how="end")
        yield from _flats(specs, index + 1, before, changed, length)
        return
    greedy = spec.letters if spec.greedy and spec.low != spec.high else ""
    if spec.optional:
        skipped = replace(bans, never=bans.never + greedy)
        yield from _flats(specs, index + 1, before, skipped, length)
    behind = takewhile(lambda s: s.negated, specs[index + 1 :])
    absent = [(s.letters, s.how) for s in behind]
    steps = before
    for count in range(1, (spec.high or length) + 1):
        step = Step(spec.name, spec.letters, spec.how, spec.until, bans.never, bans.never_first)
        if count > 1:
            # A negated stage ends a repetition that has enough, be it `not_next` or `not_followed_by`.
            never = "".join(of for of, how in absent if how == "relaxed" or count > spec.low)
            never += spec.until
            step = Step(spec.name, spec.letters, spec.inner, spec.until, never, window=spec.window)
        steps = (*steps, step)
        if len(steps) > length:
            yield steps
            return
        if count >= spec.low:
            yield from _flats(specs, index + 1, steps, Step(how="", never=greedy), length)


def pattern_of(
    specs: list[Spec], within: int | None, gap: int | None, after: object, *, grouped: bool = False
) -> object:
    """The same as users write it; conditions look at the letter of a record.

    Args:
        grouped: each stage that can be is a group of one, and all of them are a group.
    """
    built = None
    for spec in specs:
        stage = spec.name
        wanted = lambda record, letters=spec.letters: record[1] in letters  # noqa: E731
        alone = grouped and not (spec.negated or spec.greedy or spec.until)
        if alone:
            stage = hg.cep.begin(stage).where(wanted)
        if built is None:
            built = hg.cep.begin(stage) if grouped else hg.cep.begin(stage, after_match=after)
        elif spec.negated:
            built = (built.not_next if spec.how == "strict" else built.not_followed_by)(stage)
        else:
            verb = {"strict": "next", "relaxed": "followed_by", "any": "followed_by_any"}[spec.how]
            built = getattr(built, verb)(stage)
        built = quantified(built if alone else built.where(wanted), spec)
    if grouped:
        built = hg.cep.begin(built, after_match=after)
    if within is not None:
        built = built.within(f"{within}ms")
    return built if gap is None else built.within(f"{gap}ms", between="neighbours")


def quantified(built: object, spec: Spec) -> object:
    window = None if spec.window is None else f"{spec.window}ms"
    if spec.high is None:
        built = built.times_or_more(spec.low, window=window)
    elif spec.high > 1:
        built = built.times(spec.low, spec.high, window=window)
    if spec.high != 1 and spec.inner != "relaxed":
        built = built.consecutive() if spec.inner == "strict" else built.allow_combinations()
    if spec.greedy:
        built = built.greedy()
    if spec.until:
        built = built.until(lambda record, stop=spec.until: record[1] in stop)
    return built.optional() if spec.optional else built


# --- random patterns ---------------------------------------------------------------------------

NAMES = "pqrs"
letters = st.sampled_from(["a", "b", "c", "ab", "bc", "abc"])
hows = st.sampled_from(["strict", "relaxed", "any"])


@st.composite
def spec_lists(draw):
    specs = []
    for name in NAMES[: draw(st.integers(1, 4))]:
        last = specs[-1] if specs else None
        if last and not last.optional and draw(st.integers(0, 3)) == 0:
            how = draw(st.sampled_from(["strict", "relaxed"]))
            specs.append(Spec(name, draw(letters), how, negated=True))
            continue
        low = draw(st.sampled_from([1, 1, 1, 1, 2]))
        high = draw(st.sampled_from([low, low, None, None, low + 1]))
        loops = high != 1
        greedy = loops and draw(st.integers(0, 3)) == 0
        inner = draw(
            st.sampled_from(["strict", "relaxed"] if greedy else ["strict", "relaxed", "any"])
        )
        until = high is None and not greedy and draw(st.integers(0, 3)) == 0
        specs.append(
            Spec(
                name,
                draw(letters),
                draw(hows),
                low=low,
                high=high,
                optional=draw(st.integers(0, 3)) == 0,
                greedy=greedy,
                inner=inner,
                until=draw(st.sampled_from("abc")) if until else "",
                window=draw(st.none() | st.integers(1, 5)) if loops else None,
            )
        )
    return specs


@st.composite
def setups(draw):
    specs = draw(spec_lists())
    within = draw(st.none() | st.integers(1, 12))
    gap = draw(st.none() | st.none() | st.integers(1, 6))
    if within is None and gap is None and specs[-1].negated and specs[-1].how == "relaxed":
        within = 5
    if within is None and gap is None and _may_end_with_absence(specs):
        within = 5
    named = draw(st.sampled_from([spec.name for spec in specs if not spec.negated]))
    after = draw(
        st.sampled_from(
            [
                hg.cep.no_skip(),
                hg.cep.no_skip(),
                hg.cep.skip_to_next(),
                hg.cep.skip_past_last_event(),
                hg.cep.skip_to_first(named),
                hg.cep.skip_to_last(named),
            ]
        )
    )
    return specs, within, gap, after


def _may_end_with_absence(specs):
    behind = [spec for spec in specs if spec.negated and spec.how == "relaxed"]
    return bool(behind) and all(spec.optional for spec in specs[specs.index(behind[-1]) + 1 :])
