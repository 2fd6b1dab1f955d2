"""Savepoints that were never completed: known from others, never restored, deleted on request."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import headgate as hg
from headgate.connectors import collect, numbers
from headgate.errors import StateError
from headgate.operators.clock import SystemClock
from headgate.runtime.protocol import names
from headgate.runtime.savepoint import store as savepoints
from headgate.runtime.savepoint.locate import locate
from headgate.runtime.storage.open_store import open_store_at
from headgate.tests.support.lab import stop_with_savepoint


def make_job(lab: Any, *, rate: float | None = 600) -> hg.Job:
    job = hg.Job("job", parallelism=2, max_parallelism=12)
    job.checkpoint(every="50ms", storage=lab.storage)
    (
        job.read(numbers(600, rate=rate, batch_rows=20, splits=6), name="numbers")
        .map(lambda n: (n % 9, 1))
        .key_with(lambda r: r[0])
        .reduce(lambda a, b: (a[0], a[1] + b[1]), name="Count.All")
        .write(collect(guarantee="exactly_once"), name="out")
    )
    return job


@pytest.fixture
def interrupted(lab: Any) -> Path:
    """The directory of a savepoint whose coordinator died at the last moment."""
    taken: list[str] = []
    lab.run(make_job(lab), stop_with_savepoint(lab.path, taken))
    path = Path(taken[0])
    (path / names.SAVEPOINT_METADATA).unlink()
    (next(path.glob("*/*")) / ".tmp-0123").write_bytes(b"half")
    return path


def dispose(path: Path, *, unfinished: bool) -> Any:
    return asyncio.run(savepoints.dispose(open_store_at, str(path), {}, unfinished=unfinished))


def test_it_is_restored_by_nobody_and_the_error_says_what_it_is(
    lab: Any, interrupted: Path
) -> None:
    with pytest.raises(StateError, match="unfinished"):
        asyncio.run(locate(open_store_at, str(interrupted), {}, SystemClock()))
    ran = lab.run(make_job(lab), restore_from=str(interrupted))
    assert isinstance(ran.outcome.error, StateError)
    assert "the savepoint is unfinished" in str(ran.outcome.error)


def test_it_is_deleted_only_if_that_is_meant(interrupted: Path) -> None:
    with pytest.raises(StateError, match="--unfinished"):
        dispose(interrupted, unfinished=False)
    assert any(interrupted.rglob("*.parquet"))
    assert dispose(interrupted, unfinished=True) is None
    assert not interrupted.exists()


@pytest.mark.parametrize("foreign", ["notes.txt", "log/00000000000000000001.json", "a/b/c.csv"])
def test_a_directory_with_anything_else_in_it_is_left_alone(
    interrupted: Path, foreign: str
) -> None:
    file = interrupted / foreign
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"mine")
    before = sorted(interrupted.rglob("*"))
    with pytest.raises(StateError, match="there is no savepoint"):
        dispose(interrupted, unfinished=True)
    assert sorted(interrupted.rglob("*")) == before


def test_a_directory_of_another_name_is_left_alone(interrupted: Path) -> None:
    renamed = interrupted.rename(interrupted.with_name("mine"))
    with pytest.raises(StateError, match="there is no savepoint"):
        dispose(renamed, unfinished=True)
    assert any(renamed.rglob("*.parquet"))


def test_names_of_savepoints_are_known_again() -> None:
    for operator in ("count", "Zähler ("):
        for state in ("values", "Ä b"):
            for kind in ("table", "items", "file", "meta"):
                file = names.savepoint_file(operator, 3, state, kind, "x" if kind == "file" else "")
                assert names.is_savepoint_file(file), file
    assert names.is_savepoint_dir(names.savepoint_dir("a job, so called", "0123456789ab"))
    for other in ("_metadata", "log/1.json", "a/b/0.parquet", "../x-0123456789abcdef/s/0.meta"):
        assert not names.is_savepoint_file(other)
