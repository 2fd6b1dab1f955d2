"""Jobs of one operator, as a batch, give what the golden tests of streams compute by hand.

Their input is taken without what is late (in a batch nothing is), and, where the order of arrival counts,
in the order of event time.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

import headgate as hg
from headgate.connectors import collect, from_list

GOLDEN = Path(__file__).parents[1] / "golden" / "operators"
NOT_LATE = {"frozenset({47, 111, 133, 158})": "frozenset()", "frozenset({29, 53})": "frozenset()"}
IN_ORDER = {**NOT_LATE, "number * 37 % 11 - 5": "0", "number * 7 % 5 - 2": "0"}
OUT_OF_ORDER = (
    "test_windows.test_windows_of_event_time",
    "test_windows.test_days_of_a_time_zone",
    "test_windows.test_windows_without_keys",
    "test_sessions.test_sessions_of_columns",
    "test_sessions.test_sessions_by_a_function",
    "test_window_functions.test_aggregate_and_window_process",
    "test_joins.test_interval",
    "test_joins.test_window",
    "test_joins.test_co_group",
    "test_joins.test_as_of",
    "test_patterns.test_a_sequence_in_time",
    "test_patterns.test_what_must_not_come",
    "test_streams.test_steps_of_one_record",
    "test_streams.test_union",
    "test_streams.test_ways_between_subtasks",
    "test_calls.test_calls_in_order",
    "test_calls.test_dead_letters_of_map",
)
SORTED = (
    "test_aggregates.test_all_aggregates",
    "test_reduce.test_reduce_by_columns",
    "test_windows.test_count_windows",
    "test_window_functions.test_an_evictor",
)
CASES = [(name, NOT_LATE) for name in OUT_OF_ORDER] + [(name, IN_ORDER) for name in SORTED]


def load(name: str, changes: Mapping[str, str]) -> ModuleType:
    """A module of the golden tests with some of its text replaced."""
    text = (GOLDEN / f"{name}.py").read_text()
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    module = ModuleType(name)
    sys.modules[name] = module
    exec(compile(text, str(GOLDEN / f"{name}.py"), "exec"), module.__dict__)
    return module


@pytest.fixture
def modules() -> Iterator[Callable[..., ModuleType]]:
    """`load`, and everything as before at the end."""
    before = {name: module for name, module in sys.modules.items() if name.startswith(MINE)}
    yield load
    for name in [name for name in sys.modules if name.startswith(MINE)]:
        del sys.modules[name]
    sys.modules.update(before)


MINE = ("golden_input", *sorted({name.split(".")[0] for name, _ in CASES}))


def parameters(test: Any) -> Iterator[dict[str, Any]]:
    """All arguments that a test is called with beside `golden`."""
    marks = [mark for mark in getattr(test, "pytestmark", ()) if mark.name == "parametrize"]
    choices: list[list[dict[str, Any]]] = [[{}]]
    for mark in marks:
        names = [mark.args[0]] if isinstance(mark.args[0], str) else list(mark.args[0])
        values = [each if len(names) > 1 else (each,) for each in mark.args[1]]
        choices.append([dict(zip(names, each, strict=True)) for each in values])
    for some in itertools.product(*choices):
        yield {key: value for each in some for key, value in each.items()}


def comparable(rows: Iterable[Any]) -> list[Any]:
    found = [tuple(row.values()) if isinstance(row, dict) else row for row in rows]
    return sorted([rounded(row) if isinstance(row, tuple) else row for row in found], key=repr)


def rounded(row: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(round(value, 6) if isinstance(value, float) else value for value in row)


@pytest.mark.parametrize(("name", "changes"), CASES, ids=[name for name, _ in CASES])
def test_as_a_batch(
    name: str, changes: Mapping[str, str], modules: Callable[..., ModuleType], run_batch_here: Any
) -> None:
    given = modules("golden_input", changes)
    module, test = name.split(".")
    records = {"orders": given.ORDERS, "rates": given.RATES}
    proven = 0

    def golden(
        yaml: str,
        twin: Callable[[Any, Any], Any],
        *,
        rows: Iterable[Any],
        reads: tuple[str, ...] = ("orders",),
        ordered: bool = False,
        last_of: int = 0,
        sides: Mapping[str, Iterable[Any]] | None = None,
        of_side: Callable[[Any], Any] = lambda row: row,
        **timed: Any,
    ) -> None:
        nonlocal proven
        job = hg.Job("golden", parallelism=3, max_parallelism=12)
        streams = {
            each: job.read(
                from_list(
                    [msgspec.structs.asdict(record) for record in records[each]],
                    schema=type(records[each][0]),
                    batch_rows=5,
                    splits=2,
                ),
                name=each,
            ).event_time("at", max_out_of_order="0s")
            for each in reads
        }
        x = twin(streams.get("orders"), streams.get("rates"))
        outputs = {"out": collect(), **{side: collect() for side in sides or {}}}
        x.write(outputs["out"], name="out")
        for side in sides or {}:
            x.side(side).write(outputs[side], name=side)
        run_batch_here(job)
        found = comparable(outputs["out"].rows)
        if last_of:
            found = list({row[:last_of]: row for row in found}.values())
        assert found == comparable(rows)
        for side, wanted in (sides or {}).items():
            of_this = map(of_side, comparable(outputs[side].rows))
            assert comparable(of_this) == comparable(wanted)
        proven += 1

    function = getattr(modules(module, {}), test)
    for arguments in parameters(function):
        function(golden, **arguments)
    assert proven
