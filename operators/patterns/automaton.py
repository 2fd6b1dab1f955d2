"""The automaton of a pattern: from each state, the options for the next record.

A run is a partial match. Directly after taking a record it is in a *fresh* state, with all options
for what may come next. With the next record each option proceeds on its own: it takes the record,
or waits in a state that has this one option, or is given up. So a run never has to remember several
ways, and the ways do not affect each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from .conditions import Condition, Leaf

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
