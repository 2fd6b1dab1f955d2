"""`golden(...)` has a job of one operator live several lives, and compares what comes out of each."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headgate.runtime.cluster.launch import InProcessCluster

sys.path.append(str(Path(__file__).parent))  # manifests name functions by modules

from golden_lives import Rows, Spoken, calm, stormy, wider

DECLARED = {"when": "at", "max_out_of_order": "1000d"}
DECLARED_YAML = "{column: at, maxOutOfOrder: 1000d}"
"""No generator is ahead of what is declared."""


@pytest.fixture
def golden(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., None]:
    """See `prove`."""
    sockets = str(tmp_path_factory.mktemp("s"))
    cluster = partial(InProcessCluster, unix_dir=sockets)
    monkeypatch.setattr("headgate.testing.run.InProcessCluster", cluster)
    # Batches are small here, and records that are tuples of numbers should be sent as arrays all the same.
    monkeypatch.setattr("headgate.operators.elements.ObjectBatch.NUMBERS_MIN", 1)

    def prove(
        yaml: str,
        twin: Callable[[Any, Any], Any],
        *,
        rows: Sequence[Any],
        reads: tuple[str, ...] = ("orders",),
        ordered: bool = False,
        last_of: int = 0,
        sides: Mapping[str, Sequence[Any]] | None = None,
        of_side: Callable[[Any], Any] = lambda row: row,
        timed: Mapping[str, Any] = DECLARED,
        timed_yaml: str = DECLARED_YAML,
    ) -> None:
        """The job gives these rows in all its lives, in both languages.

        Each goes on from the other's savepoint: Python with state in memory, YAML on disk.

        Args:
            yaml: operators, of which `x` is the result; `HERE:name` is in the module of the test. Empty:
                there is no such form.
            twin: makes `x` of the orders and the rates.
            rows: of `x`.
            reads: the sources there are.
            ordered: rows with the same first column must come in this order, too.
            last_of: of rows that agree in this number of leading columns the last one counts.
            sides: side outputs of `x` and their rows.
            of_side: what is compared of a row of a side output.
            timed: the event time of all sources, if it is not what the input declares.
            timed_yaml: the same in YAML.
        """
        sides = sides or {}
        assert rows or sides, "this would prove nothing"
        assert all(sides.values())
        spoken = Spoken(
            request.module.__name__, yaml, twin, reads, tuple(sides), timed, timed_yaml, tmp_path
        )
        for life, outputs in lives(spoken, timed is DECLARED).items():
            found = latest(outputs["out"], last_of) if last_of else outputs["out"]
            assert in_order(found) == in_order(rows), life
            if ordered:
                assert by_first(found) == by_first(rows), life
            for side, wanted in sides.items():
                assert in_order(map(of_side, outputs[side])) == in_order(wanted), (life, side)

    return prove


def lives(spoken: Spoken, declares: bool) -> dict[str, Rows]:
    """Return the output of each life of a job."""
    found: dict[str, Rows] = {}
    python, yaml = spoken.in_python, spoken.in_yaml
    storm = partial(stormy, declares=declares)
    go_on = partial(wider, declares=declares)
    found["python, calm"] = calm(python(), declares)
    found["python, with crashes"], *taken = storm(python(), folder=spoken.folder / "python")
    if not spoken.yaml:
        found["python, gone on"] = go_on(python(), *taken)
        return found
    found["yaml, gone on from python"] = go_on(yaml("rocksdb"), *taken)
    found["yaml, calm"] = calm(yaml(), declares)
    found["yaml, with crashes"], *taken = storm(yaml(), folder=spoken.folder / "yaml")
    found["python, gone on from yaml"] = go_on(python(), *taken)
    return found


def in_order(rows: Iterable[Any]) -> list[Any]:
    return sorted(rows, key=repr)


def latest(rows: list[Any], columns: int) -> list[Any]:
    """The last of those that begin with the same columns."""
    return list({row[:columns]: row for row in rows}.values())


def by_first(rows: Sequence[Any]) -> dict[Any, list[Any]]:
    """Rows by their first column."""
    found: dict[Any, list[Any]] = {}
    for row in rows:
        found.setdefault(row[0], []).append(row)
    return found
