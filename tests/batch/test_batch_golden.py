"""Every job of one operator, as a batch, gives what its golden test computes by hand; or it is refused.

The input comes as it does in a stream, out of order. What must come out is computed as if time stood
between any two records: the portions of the golden input are single records in the order of event time, so
that nothing is late. Broadcast inputs come first.
"""

from __future__ import annotations

import inspect
import itertools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

import headgate as hg
from headgate.connectors import collect, from_list
from headgate.errors import PlanError

GOLDEN = Path(__file__).parents[1] / "golden" / "operators"
NOT_LATE = {"frozenset({47, 111, 133, 158})": "frozenset()", "frozenset({29, 53})": "frozenset()"}
SOONER = {"% 7 * 0.3": "% 7 * 0.003", "% 3 * 0.2": "% 3 * 0.002", "sleep(0.7)": "sleep(0.007)"}
"""Calls take as long here as they say."""
NEVER_LATE = {"0 < len(late) < len(counted(HALF_HOURS)[1])": "not late"}
CHANGES: dict[str, Mapping[str, str]] = {
    "golden_input": NOT_LATE,
    "test_calls": SOONER,
    "test_windows": NEVER_LATE,
}
FIRST = {"test_processes.test_broadcast"}
"""Those that read the rates before all orders."""
REFUSED = {
    "test_loops.test_records_that_go_round": "a loop",
    "test_loops.test_what_comes_back_waits_in_the_head": "a loop",
    "test_loops.test_rounds": "a loop",
    "test_processes.test_timers_of_the_clock": "ctx.processing_time",
    "test_windows.test_early_results_come_to_the_same[emit_every]": "emit_every",
}
MODULES = sorted(path.stem for path in GOLDEN.glob("test_*.py"))
NAMES = [
    f"{module}.{name}"
    for module in MODULES
    for name in re.findall(r"^def (test_\w+)", (GOLDEN / f"{module}.py").read_text(), re.MULTILINE)
]


def load(name: str) -> ModuleType:
    """A module of the golden tests with some of its text replaced."""
    text = (GOLDEN / f"{name}.py").read_text()
    for old, new in CHANGES.get(name, {}).items():
        assert old in text
        text = text.replace(old, new)
    module = ModuleType(name)
    module.__file__ = str(GOLDEN / f"{name}.py")
    sys.modules[name] = module
    exec(compile(text, str(GOLDEN / f"{name}.py"), "exec"), module.__dict__)
    return module


def in_event_time(given: Any, rates_first: bool) -> None:
    """Let the golden input come record by record, in the order of event time."""
    given.ORDERS.sort(key=lambda order: order.ms)
    given.RATES.sort(key=lambda rate: rate.ms)
    together = sorted([*given.ORDERS, *given.RATES], key=lambda record: record.ms)
    times = [record.ms for record in together]
    assert len(set(times)) == len(times), "the order of equal ones would be another matter"
    steps = [([], [each]) if isinstance(each, given.Rate) else ([each], []) for each in together]
    if rates_first:
        times = [given.ORDERS[0].ms, *(order.ms for order in given.ORDERS)]
        steps = [([], list(given.RATES)), *(([order], []) for order in given.ORDERS)]
    given.STREAM[:] = [
        given.Portion(orders, rates, following - 1)
        for (orders, rates), following in zip(steps, [*times[1:], times[-1]], strict=True)
    ]
    for arrivals, records in ((given.ARRIVALS, given.ORDERS), (given.RATE_ARRIVALS, given.RATES)):
        arrivals[:] = [given.Arrival(record, record.ms - 1) for record in records]


@pytest.fixture
def modules() -> Iterator[Callable[[str], ModuleType]]:
    """`load`, and everything as before at the end."""
    mine = {"golden_input", *MODULES}
    before = {name: module for name, module in sys.modules.items() if name in mine}
    yield load
    for name in mine & sys.modules.keys():
        del sys.modules[name]
    sys.modules.update(before)


def parameters(test: Any) -> Iterator[dict[str, Any]]:
    """All arguments that a test is called with beside fixtures."""
    marks = [mark for mark in getattr(test, "pytestmark", ()) if mark.name == "parametrize"]
    choices: list[list[dict[str, Any]]] = [[{}]]
    for mark in marks:
        names = mark.args[0] if isinstance(mark.args[0], tuple) else (mark.args[0],)
        values = [each if len(names) > 1 else (each,) for each in mark.args[1]]
        choices.append([dict(zip(names, each, strict=True)) for each in values])
    for some in itertools.product(*choices):
        yield {key: value for each in some for key, value in each.items()}


def comparable(rows: Iterable[Any]) -> list[Any]:
    found = [columns(row) for row in rows]
    return sorted([rounded(row) if isinstance(row, tuple) else row for row in found], key=repr)


def columns(row: Any) -> Any:
    """The values of a row, or of a record."""
    if isinstance(row, msgspec.Struct):
        return msgspec.structs.astuple(row)
    return tuple(row.values()) if isinstance(row, dict) else row


def rounded(row: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(round(value, 6) if isinstance(value, float) else value for value in row)


class Prover:
    """Stands in for the fixture `golden` of the streams' tests, see there."""

    def __init__(self, records: Mapping[str, list[Any]], run: Callable[[hg.Job], Any]) -> None:
        self._records = records
        self._run = run
        self.refused = ""
        """Why a batch was refused."""

    def __call__(
        self,
        yaml: str,
        twin: Callable[[Any, Any], Any],
        *,
        rows: Iterable[Any],
        reads: tuple[str, ...] = ("orders",),
        ordered: bool = False,
        last_of: int = 0,
        sides: Mapping[str, Iterable[Any]] | None = None,
        of_side: Callable[[Any], Any] = lambda row: row,
        timed: Mapping[str, Any] | None = None,
        timed_yaml: str = "",
    ) -> None:
        job = hg.Job("golden", parallelism=3, max_parallelism=12)
        streams = {name: self._read(job, name, timed) for name in reads}
        x = twin(streams.get("orders"), streams.get("rates"))
        outputs = {"out": collect(), **{side: collect() for side in sides or {}}}
        x.write(outputs["out"], name="out")
        for side in sides or {}:
            x.side(side).write(outputs[side], name=side)
        try:
            self._run(job)
        except PlanError as error:
            self.refused = error.message
            return
        found = comparable(outputs["out"].rows)
        if last_of:
            latest = {row[:last_of]: row for row in map(columns, outputs["out"].rows)}
            found = comparable(latest.values())
        assert found == comparable(rows)
        for side, wanted in (sides or {}).items():
            of_this = map(of_side, comparable(outputs[side].rows))
            assert comparable(of_this) == comparable(wanted)

    def _read(self, job: hg.Job, name: str, timed: Mapping[str, Any] | None) -> Any:
        records = self._records[name]
        rows = [msgspec.structs.asdict(record) for record in records]
        source = from_list(rows, schema=type(records[0]), batch_rows=5, splits=2)
        return job.read(source, name=name).event_time(
            **(timed or {"when": "at", "max_out_of_order": "0s"})
        )


@pytest.mark.parametrize("name", NAMES)
def test_as_a_batch(
    name: str, modules: Callable[[str], ModuleType], run_batch_here: Any, tmp_path: Path
) -> None:
    given: Any = modules("golden_input")
    records = {"orders": list(given.ORDERS), "rates": list(given.RATES)}
    in_event_time(given, rates_first=name in FIRST)
    module, test = name.split(".")
    function = getattr(modules(module), test)
    fixtures = (
        {"tmp_path": tmp_path} if "tmp_path" in inspect.signature(function).parameters else {}
    )
    for arguments in parameters(function):
        prove = Prover(records, run_batch_here)
        function(prove, **fixtures, **arguments)
        early = "".join(f"[{key}]" for key in arguments.get("given", ()))
        why = REFUSED.get(name) or REFUSED.get(name + early, "")
        assert bool(prove.refused) == bool(why), prove.refused
        assert why in prove.refused
