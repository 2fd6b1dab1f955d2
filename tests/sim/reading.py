"""Clients of a simulated job read its state, and their answers are compared with those expected."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from headgate.operators.base import Operator, OperatorContext
from headgate.operators.process.operator import ProcessOperator
from headgate.operators.windows.tumbling import TumblingAggregate
from headgate.state.hashing import hash_key, key_group_of
from headgate.state.keyed.base import ABSENT
from headgate.state.snapshot import StateSnapshot

from .counting import CountedForClients
from .outside import KEYS, WORLDS, World
from .timed import expected_windows


@dataclass(frozen=True, slots=True)
class Reads:
    """A state that clients read.

    Attributes:
        state: its name.
        absent: what a key has of which there is nothing in the state.
        plain: makes of a value in an answer what is compared.
        visible: returns what the sink has shown of a key, for `check`.
        check: checks a value of a key, given what had been visible when the client asked.
        live: the job notes each change of a value, so that live ones can be told.
    """

    state: str
    absent: Any
    plain: Callable[[Any], Any]
    visible: Callable[[World, int], Any]
    check: Callable[[World, int, Any, Any], None]
    live: bool = False

    def value(self, answered: Any) -> Any:
        """Return the value of an answer as it is compared; None: there was none."""
        return self.absent if answered is None else self.plain(answered)


# -- counts -------------------------------------------------------------------------------------------


def _visible_count(world: World, key: int) -> int:
    return len(world.by_key.get(key, ()))


def _check_count(world: World, key: int, least: int, count: int) -> None:
    """Check a count: no visible record is missing in it, and it has none that is not there."""
    most = len(range(key, world.rows, KEYS))
    if not least <= count <= most:
        world.violated(f"a client has read {count} of key {key}, and it must be {least} to {most}")


COUNTS: Final = Reads("count", 0, lambda value: value, _visible_count, _check_count, live=True)

# -- windows ------------------------------------------------------------------------------------------

Windows = tuple[tuple[int, int, int], ...]
"""Start, number of records, and total of each window of a key."""


def _windows(value: list[dict[str, Any]]) -> Windows:
    return tuple((_ms(row["window_start"]), row["numbers"], row["total"]) for row in value)


def _ms(start: str | datetime) -> int:
    moment = datetime.fromisoformat(start) if isinstance(start, str) else start
    return round(1000 * moment.timestamp())


def _visible_windows(world: World, key: int) -> dict[int, int]:
    """Return by start how many records the sink has shown of each window of a key."""
    most: dict[int, int] = {}
    for _, start, numbers, _ in world.by_key.get(key, ()):
        at = _ms(start)  # type: ignore[arg-type]
        most[at] = max(most.get(at, 0), numbers)
    return most


def _check_windows(world: World, key: int, least: Mapping[int, int], windows: Windows) -> None:
    """Check windows: of those that are open no visible record is missing, and none is not there."""
    for start, numbers, total in windows:
        wanted = expected_windows(world.rows).get((key, start), (0, 0))
        fewest = least.get(start, 1)
        if not fewest <= numbers <= wanted[0] or (numbers == wanted[0] and total != wanted[1]):
            world.violated(
                f"a client has read {numbers}, {total} of key {key} at {start}, and it must be "
                f"{fewest} to {wanted}"
            )


WINDOWS: Final = Reads("windows", (), _windows, _visible_windows, _check_windows)

# -- what a job notes ---------------------------------------------------------------------------------

_open: Final = ProcessOperator.open
_snapshot: Final = ProcessOperator.snapshot
_snapshot_of_windows: Final = TumblingAggregate.snapshot


def noted_open(operator: ProcessOperator, context: OperatorContext) -> None:
    """Open an operator, and note in the world which checkpoint its attempt begins with."""
    WORLDS["sim"].restored[context.attempt] = context.restored_checkpoint
    _open(operator, context)


def noted_snapshot(operator: ProcessOperator, checkpoint_id: int) -> StateSnapshot:
    """Take a snapshot, and note in the world what counts there are at this moment."""
    function, context = operator._function, operator.context
    if isinstance(function, CountedForClients):
        restored = WORLDS["sim"].cuts.get(context.restored_checkpoint, {})
        _note(
            operator,
            checkpoint_id,
            {
                key: function.counted.get(key, restored.get(key, (0, 0))[1])
                for key in _own_keys(context)
            },
        )
    return _snapshot(operator, checkpoint_id)


def noted_windows(operator: TumblingAggregate, checkpoint_id: int) -> StateSnapshot:
    """Take a snapshot, and note in the world what windows there are at this moment."""
    if operator._committed:
        keys = _own_keys(operator.context)
        found = zip(keys, operator.query_many("windows", keys), strict=True)
        _note(
            operator,
            checkpoint_id,
            {key: WINDOWS.value(None if value is ABSENT else value) for key, value in found},
        )
    return _snapshot_of_windows(operator, checkpoint_id)


def _own_keys(context: OperatorContext) -> list[int]:
    most, own = context.max_parallelism, context.key_groups
    return [key for key in range(KEYS) if key_group_of(hash_key(key), most) in own]


def _note(operator: Operator, checkpoint_id: int, values: Mapping[int, Any]) -> None:
    """Note the values of a cut."""
    cut = WORLDS["sim"].cuts.setdefault(checkpoint_id, {})
    for key, value in values.items():
        # An attempt that is over may come late to a number that the next one uses again.
        noted = (operator.context.attempt, value)
        cut[key] = max(cut.get(key, noted), noted)


# -- answers ------------------------------------------------------------------------------------------


def live_counts(world: World) -> dict[int, dict[int, int]]:
    """Return the counts of each attempt by key, as they are now."""
    return {attempt: dict(counts) for attempt, counts in world.live.items()}


def check_live(
    world: World, attempt: int, key: int, before: Mapping[int, Mapping[int, int]], count: int
) -> None:
    """Check a count that was read where it is: it is one that this attempt had meanwhile.

    Args:
        world: of the job.
        attempt: the attempt that the answer names.
        key: whose count it is.
        before: the counts of all attempts when the client asked.
        count: the answer.
    """
    _, restored = world.cuts.get(world.restored[attempt], {}).get(key, (0, 0))
    least = before.get(attempt, {}).get(key, restored)
    most = world.live.get(attempt, {}).get(key, restored)
    if not least <= count <= most:
        world.violated(
            f"a client has read {count} of key {key} in attempt {attempt}, and it must be {least} to {most}"
        )


def check_committed(world: World, reads: Reads, checkpoint_id: int, key: int, value: Any) -> None:
    """Check a value that was read as of a checkpoint."""
    if checkpoint_id not in world.completed:
        world.violated(f"a client has read checkpoint {checkpoint_id}, which is not complete")
    _, wanted = world.cuts.get(checkpoint_id, {}).get(key, (0, reads.absent))
    if value != wanted:
        world.violated(
            f"a client has read {value} of key {key} as of checkpoint {checkpoint_id}, wanted {wanted}"
        )


def check_followed(
    world: World, reads: Reads, keys: list[int], known: dict[int, Any], answer: dict[str, Any]
) -> None:
    """Check what a client that follows keys is told: each change once, and nothing is left out.

    Args:
        world: of the job.
        reads: the state.
        keys: what it follows.
        known: the values that it has been told; those of this answer are added.
        answer: what it gets, possibly without a change.
    """
    checkpoint = answer["checkpoint"]
    for row in answer["rows"]:
        key, value = row["key"], reads.value(row["value"])
        if known.get(key) == value:
            world.violated(f"a client is told twice of {value} of key {key}, now at {checkpoint}")
        known[key] = value
    for key in keys:
        if key not in known:
            world.violated(f"a client that follows key {key} is not told of it")
        check_committed(world, reads, checkpoint, key, known.get(key, reads.absent))


def check_scanned(
    world: World, reads: Reads, level: str, before: Mapping[int, Any], pages: list[dict[str, Any]]
) -> None:
    """Check the pages of a scan: each key is there once, with the value that a query of it may have.

    `before` has what was visible of each key when the scan began.
    """
    values: dict[int, Any] = {}
    for row in (row for page in pages for row in page["rows"]):
        if row["key"] in values:
            world.violated(f"a scan has key {row['key']} twice")
        values[row["key"]] = reads.value(row["value"])
    checkpoints = {page["checkpoint"] for page in pages}
    if len(checkpoints) > 1:
        world.violated(f"a scan is of the checkpoints {checkpoints}")
    for key, visible in before.items():
        value = values.get(key, reads.absent)
        if level != "live":
            check_committed(world, reads, pages[0]["checkpoint"], key, value)
        reads.check(world, key, visible, value)
